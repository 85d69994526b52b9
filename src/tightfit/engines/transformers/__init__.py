"""The transformers engine: continuous batching with torch."""
