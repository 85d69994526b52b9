"""The parts of `tightfit prepare`: what is asked, what is wrong with it, and what becomes of it."""
