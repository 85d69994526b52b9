"""Charts as PNG or as one HTML file: memory, traces, speeds."""
