"""Oracles of decisions: what the coordinator does follows from what it knows, and breaks no rule."""
