"""Streaming DataFrames: a query writes Spark's micro-batches to a log, tasks read it, and checkpoints free it."""
