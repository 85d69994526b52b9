"""Slurm: batch scripts written, submitted and followed."""
