"""Sinks of tables: which rows become one file, and when. The host writes the files."""
