"""OpenAI's HTTP API over the engines."""
