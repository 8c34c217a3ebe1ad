"""Streams: the methods with which a driver script describes its steps, from sources to tables."""
