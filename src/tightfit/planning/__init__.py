"""The strategy space, the search, the Plan and its explanation."""
