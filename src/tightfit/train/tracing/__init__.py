"""The training step on fake tensors: what the tracer of `estimate.trace` is handed."""
