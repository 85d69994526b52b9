"""Measuring one machine: what its device, its host and its links sustain."""
