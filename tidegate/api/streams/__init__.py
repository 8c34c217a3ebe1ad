"""Streams: the methods by which a driver script says what becomes of rows, from sources to tables."""
