"""Quantization to GGUF, GPTQ and bitsandbytes formats."""
