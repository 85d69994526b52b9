"""Talking to a model in the terminal."""
