"""Indexes from keys to slots: one for keys that fit into a word, and one for keys of bytes."""
