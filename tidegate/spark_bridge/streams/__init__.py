"""Streaming DataFrames: a query writes Spark's micro-batches to a log, tasks read it, and rows that no checkpoint
needs are deleted.
"""
