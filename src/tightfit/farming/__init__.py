"""Farming."""
