"""What every room stands on: errors, units, dtypes, strategies, recipes, files."""
