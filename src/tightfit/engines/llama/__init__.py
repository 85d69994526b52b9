"""The llama.cpp engine: GGUF files in this process."""
