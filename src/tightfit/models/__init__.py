"""Architectures: from a name, folder or file to a ModelSpec with exact counts."""
