"""The tracer: one fake training step, recorded and replayed through torch's allocator."""
