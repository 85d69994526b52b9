"""Many prompts answered once each, resumably, with statistics."""
