"""Makes the threads for the I/O of one attempt of a job that runs in one process.

Rules: a read of a source may block for as long as it likes, so every source subtask has a thread to itself (it reads
one thing at a time), and some are left to write state. A read cannot be interrupted: the next attempt gets a new pool,
and the threads of the old one end with their reads.
"""

from __future__ import annotations

from collections.abc import Callable

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.hosts.threads import WorkerPool

IO_THREADS = 4
"""Threads for everything but reads of sources, and waiting for functions that are called asynchronously."""


def io_pool(graph: JobGraph, died: Callable[[BaseException], object]) -> WorkerPool:
    """The pool of one attempt."""
    sources = sum(vertex.parallelism for vertex in graph.vertices if vertex.source is not None)
    callers = sum(v.parallelism for v in graph.vertices if any(spec.calls is not None for spec in v.operators))
    return WorkerPool(IO_THREADS + sources + callers, "tidegate-io", died)
