"""Nexmark: a stream of people, auctions and bids, and queries over it as programs of the public API.

`workload.py` says what the events are, `people.py`, `auctions.py` and `bids.py` make their columns, `source.py` reads
them as a `tg.Source`. `queries/` has the programs, each beside a reference that Polars computes from the same events.
The proportions, ratios and widths are those that Nexmark's generator for Flink publishes; the rows are made otherwise.
"""
