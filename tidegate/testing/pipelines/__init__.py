"""Pipelines that a seed draws, with the rows that each must write."""
