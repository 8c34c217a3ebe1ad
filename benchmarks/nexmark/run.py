"""Runs a query as a job, to its end: into a table or into memory, for tests and checks, or nowhere, for benchmarks."""

from __future__ import annotations

import polars as pl

import tidegate as tg
from nexmark.query import Events, Query, Rows
from nexmark.workload import Workload


def add(query: Query, env: tg.StreamEnvironment, workload: Workload, url: str, parts: int = 2) -> tg.OutputTable:
    """The program of a query into a table at a URL."""
    result = query.program(Events(env, workload, query, parts))
    if query.keys:
        return result.to_table(url, mode="upsert", keys=query.keys, uid="result")
    return result.to_table(url, uid="result")


def result_of(table: pl.DataFrame, query: Query) -> list[tuple[object, ...]]:
    """Rows to compare: those of a result or a reference, in an order of their own."""
    comparable = query.comparable(table)
    names = sorted(comparable.columns)
    return sorted(comparable.select(names).with_columns(pl.col(pl.Float64).round(6)).rows(), key=repr)


def expected(query: Query, workload: Workload) -> list[tuple[object, ...]]:
    """The rows of the reference."""
    return result_of(query.reference(Rows(workload)), query)
