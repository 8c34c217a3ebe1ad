"""Indexes that map keys to slot numbers: for keys of one 64-bit word, of two words, and for byte strings."""
