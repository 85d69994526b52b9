"""From a name or a folder to a live model: files, tokenizer, weights, adapters, attention."""
