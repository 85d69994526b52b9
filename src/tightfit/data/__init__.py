"""Datasets: reading files and profiling the lengths of their rows."""
