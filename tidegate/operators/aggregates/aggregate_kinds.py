"""`AggregateKind`: what an aggregate computes."""

from __future__ import annotations

import enum


class AggregateKind(enum.Enum):
    """What is computed; the value is what users call it."""

    COUNT = "count"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    MEAN = "mean"
    VAR_POP = "var_pop"
    VAR_SAMP = "var_samp"
    STDDEV_POP = "stddev_pop"
    STDDEV_SAMP = "stddev_samp"
    BOOL_AND = "bool_and"
    BOOL_OR = "bool_or"
    FIRST = "first"
    LAST = "last"
    ARG_MIN = "arg_min"
    ARG_MAX = "arg_max"
    COUNT_DISTINCT = "count_distinct"
    COLLECT_LIST = "collect_list"
    USER = "udaf"


EXTREMES = frozenset({AggregateKind.MIN, AggregateKind.MAX, AggregateKind.BOOL_AND, AggregateKind.BOOL_OR})
"""The least or the greatest value of a column."""

SPREADS = frozenset(
    {AggregateKind.VAR_POP, AggregateKind.VAR_SAMP, AggregateKind.STDDEV_POP, AggregateKind.STDDEV_SAMP}
)
"""Variances and standard deviations."""

CHOICES = frozenset({AggregateKind.FIRST, AggregateKind.LAST, AggregateKind.ARG_MIN, AggregateKind.ARG_MAX})
"""A column of one row, which is chosen."""

NULL_WITHOUT_VALUES = frozenset({AggregateKind.SUM, *EXTREMES})
"""Aggregates whose first column is null until a value comes."""
