"""Operators over whole batches: expressions, aggregates per key, table sinks."""
