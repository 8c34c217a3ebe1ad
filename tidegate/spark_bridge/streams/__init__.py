"""Streaming DataFrames: Spark's micro-batches land in a log, which tasks follow and checkpoints let go of."""
