"""Facts as data: model configs, GPUs and prices, each row with its source."""
