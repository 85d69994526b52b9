"""The command line: one file per verb, and all rendering."""
