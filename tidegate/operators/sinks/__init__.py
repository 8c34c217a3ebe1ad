"""Operators in front of sinks: they decide which rows become one file or one commit, and when.

The task writes the files.
"""
