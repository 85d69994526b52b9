"""The parts of `tightfit train`: from what was asked to a run folder, a run, and its report."""
