"""GPUs, nodes and clusters: parsed from words or probed from the machine."""
