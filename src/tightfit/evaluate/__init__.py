"""Scores of a model on data: loss, exact match, ROUGE, execution accuracy of SQL."""
