"""Closed forms for memory and time. No torch, no run history."""
