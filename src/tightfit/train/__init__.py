"""The training loop, its one step, and everything that keeps a run alive."""
