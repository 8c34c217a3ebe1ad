"""Operators that give the first rows of each window, when it ends."""
