"""Meta's files and GGUF to Hugging Face folders, and those to GGUF."""
