"""Is it still the same model? Scores, answers, template, tokens, ends."""
