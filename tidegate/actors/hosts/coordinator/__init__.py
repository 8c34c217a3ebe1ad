"""Drives the coordinator's machine: logs its events before it acts on them, and does its I/O.

`coordinator_host.py` leads. Beside it are the event log's writer, the lease, master hooks, and the causes of events.
"""
