"""GGUF files: families, metadata, tokenizer, tensors, and the way to a Hugging Face folder."""
