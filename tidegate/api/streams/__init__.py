"""Streams: the methods by which a driver script describes its steps, from sources to tables."""
