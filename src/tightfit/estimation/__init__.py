"""Estimation."""
