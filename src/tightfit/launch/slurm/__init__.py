"""Slurm: batch scripts written, submitted, followed."""
