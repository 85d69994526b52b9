"""The version, where every room can read it without loading the API."""

__version__ = "0.1.0"
