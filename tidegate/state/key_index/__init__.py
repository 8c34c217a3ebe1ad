"""Indexes that map keys to slots: for keys of one word, of two words, and for byte strings."""
