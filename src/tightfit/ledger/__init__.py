"""What was predicted and what was measured: run folders, their reports, and the store of both."""
