"""One small reader per model family, from a config's fields to a ModelSpec."""
