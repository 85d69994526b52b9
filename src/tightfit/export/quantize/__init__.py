"""Fewer bits: GGUF, GPTQ and bitsandbytes, and what each of them loses."""
