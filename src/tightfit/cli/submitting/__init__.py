"""The parts of `tightfit submit`: a run folder prepared here, a job elsewhere, and its end."""
