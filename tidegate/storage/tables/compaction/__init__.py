"""Compaction: few large files in place of many small ones, at rest and beside the job that writes."""
