"""Using a model: chat, batches of prompts with statistics, the HTTP API, the compare page."""
