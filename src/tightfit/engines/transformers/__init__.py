"""The transformers engine: loading aside, everything that answers with torch."""
