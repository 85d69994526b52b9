"""What the training verbs share: recipes, settings, hardware, data, search, traces, run folders."""
