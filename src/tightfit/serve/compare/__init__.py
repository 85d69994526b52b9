"""The web page with two models side by side."""
