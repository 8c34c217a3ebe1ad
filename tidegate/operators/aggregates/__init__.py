"""Aggregates: their definitions, the accumulators that store their state in columns, and the operators that compute
them for each key or over all rows.
"""
