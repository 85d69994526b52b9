"""What verbs print: one file per verb or part of it, text alone, no decisions."""
