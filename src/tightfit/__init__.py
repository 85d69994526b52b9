"""Predict, run and check fine-tuning on the GPUs you have."""

__version__ = "0.1.0"
