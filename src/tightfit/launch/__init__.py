"""Starting workers from a plan, watching them, and starting them again."""
