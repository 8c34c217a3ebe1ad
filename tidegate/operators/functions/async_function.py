"""`AsyncFunction`: a function that waits for something outside, such as a service, and how it is to be called.

`AsyncMap` decides what is asked and when, `hosts/task/async_calls.py` calls the function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tidegate.storage.errors import ConfigurationError

CAPACITY_MAX = 100_000
RETRIES_MAX = 1_000


@dataclass(frozen=True, slots=True)
class AsyncFunction:
    """`fn` is called with a row as a dict or, with `batch_size`, with batches of at most so many rows.

    With `batch_timeout_ms` rows wait for that time at most until a batch is full. Otherwise a batch is what has come.

    It returns an awaitable, or a future of `concurrent.futures`. One that raises, or takes longer than `timeout_ms`,
    is called again up to `retries` times.
    """

    fn: Callable[[Any], Any]
    capacity: int
    timeout_ms: int
    retries: int = 0
    batch_size: int | None = None
    batch_timeout_ms: int | None = None

    def check(self, step: str) -> None:
        """Raise ConfigurationError for what cannot be called so."""
        if not callable(self.fn):
            raise ConfigurationError(f"{step}: fn must be a function, such as an async def, not {self.fn!r}")
        if inspect.isasyncgenfunction(self.fn) or inspect.isgeneratorfunction(self.fn):
            raise ConfigurationError(f"{step}: fn is a generator; it must return one result for each call, not yield")
        wrong = [
            f"{name} must be between {least} and {most}, not {value!r}"
            for name, value, least, most in (
                ("capacity", self.capacity, 1, CAPACITY_MAX),
                ("retries", self.retries, 0, RETRIES_MAX),
                ("batch_size", 1 if self.batch_size is None else self.batch_size, 1, CAPACITY_MAX),
            )
            if type(value) is not int or not least <= value <= most
        ]
        if self.timeout_ms <= 0:
            wrong.append("timeout must be greater than 0")
        if self.batch_timeout_ms is not None and self.batch_timeout_ms <= 0:
            wrong.append("batch_timeout must be greater than 0")
        if self.batch_timeout_ms is not None and self.batch_size is None:
            wrong.append(
                "batch_timeout= is how long rows wait until a batch is full, and fn gets single rows; give batch_size= "
                "as well"
            )
        if wrong:
            raise ConfigurationError(f"{step}: {wrong[0]}")


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is to be made: rows of one batch. Numbers are unique in an operator of an attempt."""

    number: int
    rows: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call has returned, or why it has failed for good."""

    number: int
    result: Any = None
    error: BaseException | None = None
