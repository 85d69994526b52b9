"""The vLLM engine, where vLLM is installed."""
