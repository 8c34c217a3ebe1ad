"""Aggregates: their definitions, the accumulators that store them, and the operators that compute them by key or over
all rows.
"""
