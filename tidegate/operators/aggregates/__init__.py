"""Aggregates: what each computes, the accumulators that keep it, and the operators that do so by key or for all."""
