"""Approximate aggregates from Apache DataSketches: distinct values by HyperLogLog, and quantiles by t-digests.

The state of a key is one sketch of bounded size in bytes, for any number of rows. Rules:

- For each key in a batch, the sketch is read once, updated with all values of the batch, and written once.
- Distinct values are identified by their 64-bit key hash. The hash function never changes. Sketches of different jobs
  and versions can therefore be merged. A value that occurs several times in a batch is added once.
- Both sketches are deterministic: the same rows in the same order produce the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.aggregates.aggregate import Aggregate, udaf
from tidegate.operators.aggregates.aggregate_function import BatchAggregateFunction, Groups, NewState
from tidegate.state.kernels.columns import key_form
from tidegate.state.kernels.hashing import hash_forms
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.extras import load, need

if TYPE_CHECKING:
    import polars as pl


_EXTRA = "sketches"
_LIBRARY = "datasketches"


class _Sketch(BatchAggregateFunction):
    """Base class of both sketches. The state of a group is the serialised sketch, or null before the first value."""

    state = pa.schema({"sketch": pa.large_binary()})

    def _library(self) -> Any:
        return load(str(self), _EXTRA, _LIBRARY)

    def _written(self, state: pa.RecordBatch, changed: Iterator[tuple[int, bytes]]) -> NewState:
        """Returns the state with the sketches of some groups replaced.

        `changed` yields a group index and the bytes of its new sketch.
        """
        sketches = state.column(0).to_pylist()
        for group, sketch in changed:
            sketches[group] = sketch
        return {"sketch": pa.array(sketches, pa.large_binary())}


class ApproxCountDistinct(_Sketch):
    """Aggregate function for the approximate number of distinct values, by a HyperLogLog sketch with 2**`precision`
    registers.
    """

    output = pa.int64()

    def __init__(self, precision: int) -> None:
        self._precision = precision

    def validate(self, *columns: pa.DataType) -> None:
        """Raises ValueError for a column type that cannot be a key, because its values have no hash."""
        try:
            key_form(pa.array([], columns[0]), "")
        except ConfigurationError as error:
            raise ValueError(
                f"distinct values of {columns[0]} cannot be counted: they have no hash"
                "; cast the column to a number or a string"
            ) from error

    def accumulate(self, state: pa.RecordBatch, groups: Groups, *columns: pa.Array) -> NewState:
        """Adds the values of rows to the sketches of their groups. Returns the new state of all groups."""
        valid = np.flatnonzero(columns[0].is_valid().to_numpy(zero_copy_only=False))
        values = columns[0].take(pa.array(valid))
        hashes = hash_forms([key_form(values, "")], len(values))
        pairs = pa.record_batch({"group": groups[valid], "hash": hashes})
        first = KeyIndex(("group", "hash")).upsert(pairs).first_rows
        return self._written(state, self.added(state, groups[valid][first], hashes[first]))

    def added(self, state: pa.RecordBatch, groups: Groups, hashes: NDArray[np.uint64]) -> Iterator[tuple[int, bytes]]:
        """Yields pairs of a group index and the new sketch of the group, as bytes."""
        library, held = self._library(), state.column(0)
        for group, rows in _by_group(groups):
            before = held[group].as_py()
            sketch = library.hll_sketch(self._precision) if before is None else library.hll_sketch.deserialize(before)
            for value in hashes[rows].tolist():
                sketch.update(value)
            yield group, sketch.serialize_compact()

    def merge(self, state: pa.RecordBatch, groups: Groups, other: pa.RecordBatch) -> NewState:
        """Merges other sketches into the sketches of their groups. Returns the new state of all groups."""
        return self._written(state, self._merged(state, groups, other.column(0)))

    def _merged(self, state: pa.RecordBatch, groups: Groups, other: pa.Array) -> Iterator[tuple[int, bytes]]:
        library, held = self._library(), state.column(0)
        for group, rows in _by_group(groups):
            found = [held[group].as_py(), *(other[row].as_py() for row in rows.tolist())]
            sketches = [library.hll_sketch.deserialize(each) for each in found if each is not None]
            if sketches:
                union = library.hll_union(self._precision)
                for sketch in sketches:
                    union.update(sketch)
                yield group, union.get_result().serialize_compact()

    def result(self, state: pa.RecordBatch) -> Any:
        """Returns the estimate for each group, rounded to an integer. 0 for a group without values."""
        library = self._library()
        found = state.column(0).to_pylist()
        return [0 if s is None else round(library.hll_sketch.deserialize(s).get_estimate()) for s in found]

    def __str__(self) -> str:
        return "approx_count_distinct"


class ApproxQuantile(_Sketch):
    """Aggregate function for approximate quantiles of numbers, by a t-digest."""

    def __init__(self, quantiles: float | Sequence[float], accuracy: int) -> None:
        self._one = isinstance(quantiles, float | int)
        self._quantiles = [quantiles] if isinstance(quantiles, float | int) else list(quantiles)
        self._accuracy = accuracy
        self.output = pa.float64() if self._one else pa.list_(pa.float64())

    def validate(self, *columns: pa.DataType) -> None:
        """Raises ValueError for a column type that is not an integer, a float or a decimal."""
        kinds, data_type = pa.types, columns[0]
        if not (kinds.is_integer(data_type) or kinds.is_floating(data_type) or kinds.is_decimal(data_type)):
            raise ValueError(
                f"the column is {data_type}; quantiles are of integers, floats and decimals"
                "; cast the column to one of them"
            )

    def accumulate(self, state: pa.RecordBatch, groups: Groups, *columns: pa.Array) -> NewState:
        """Adds the numbers of rows to the digests of their groups, without nulls and NaN.

        Returns the new state of all groups.
        """
        numbers = columns[0].cast(pa.float64(), safe=False).fill_null(math.nan).to_numpy()
        rows = np.flatnonzero(~np.isnan(numbers))
        return self._written(state, self.added(state, groups[rows], numbers[rows]))

    def added(self, state: pa.RecordBatch, groups: Groups, numbers: NDArray[np.float64]) -> Iterator[tuple[int, bytes]]:
        """Yields pairs of a group index and the new digest of the group, as bytes."""
        held = state.column(0)
        for group, rows in _by_group(groups):
            digest = self._digest(held[group].as_py())
            digest.update(numbers[rows])
            yield group, digest.serialize()

    def merge(self, state: pa.RecordBatch, groups: Groups, other: pa.RecordBatch) -> NewState:
        """Merges other digests into the digests of their groups. Returns the new state of all groups."""
        return self._written(state, self._merged(state, groups, other.column(0)))

    def _merged(self, state: pa.RecordBatch, groups: Groups, other: pa.Array) -> Iterator[tuple[int, bytes]]:
        held = state.column(0)
        for group, rows in _by_group(groups):
            found = [each for each in (other[row].as_py() for row in rows.tolist()) if each is not None]
            if found:
                digest = self._digest(held[group].as_py())
                for each in found:
                    digest.merge(self._digest(each))
                yield group, digest.serialize()

    def _digest(self, held: bytes | None) -> Any:
        made = self._library().tdigest_double
        return made(self._accuracy) if held is None else made.deserialize(held)

    def result(self, state: pa.RecordBatch) -> Any:
        """Returns the quantile, or the list of quantiles, of each group. Null for a group without numbers."""
        found = [None if each is None else self._of(self._digest(each)) for each in state.column(0).to_pylist()]
        if self._one:
            return pa.array([None if each is None else each[0] for each in found], pa.float64())
        return pa.array(found, self.output)

    def _of(self, digest: Any) -> list[float]:
        return [digest.get_quantile(quantile) for quantile in self._quantiles]

    def __str__(self) -> str:
        return "approx_quantile"


def approx_count_distinct(column: str | pl.Expr, *, precision: int = 12) -> Aggregate:
    """Estimates the number of distinct values of a column, without nulls. The result is int64 and never null.

    `precision` is from 4 to 21. The state of a key has at most about 2**`precision` bytes. The relative standard error
    is about 1.04 / 2**(precision / 2): 1.6 % for a precision of 12. Up to a few dozen values the result is exact. Needs
    the extra `sketches`.
    """
    if isinstance(precision, bool) or not isinstance(precision, int) or not 4 <= precision <= 21:
        raise ConfigurationError(
            f"approx_count_distinct takes a precision of 4 to 21, not {precision!r}; give a value in this range"
        )
    need("approx_count_distinct", _EXTRA)
    return udaf(ApproxCountDistinct(precision), column)


def approx_quantile(column: str | pl.Expr, quantiles: float | Sequence[float], *, accuracy: int = 200) -> Aggregate:
    """Estimates the value at a quantile (0.5 is the median) of a column of numbers, or a list of float64 for several
    quantiles.

    Nulls and NaN are skipped, and the result is null without a number. The t-digest is more exact near 0 and 1. With an
    `accuracy` of 200 the median is off by up to 2 % of the rows, and the 0.99 quantile by 0.2 %. `accuracy` is from 10
    to 10000. The state of a key has up to about 20 bytes for each unit of accuracy. Needs the extra `sketches`.
    """
    several = [quantiles] if isinstance(quantiles, float | int) else list(quantiles)
    if not several or not all(isinstance(q, float | int) and 0 <= q <= 1 for q in several):
        raise ConfigurationError(
            f"approx_quantile takes quantiles from 0 to 1, not {quantiles!r}; give a value in this range"
        )
    if isinstance(accuracy, bool) or not isinstance(accuracy, int) or not 10 <= accuracy <= 10_000:
        raise ConfigurationError(
            f"approx_quantile takes an accuracy of 10 to 10000, not {accuracy!r}; give a value in this range"
        )
    need("approx_quantile", _EXTRA)
    return udaf(ApproxQuantile(quantiles, accuracy), column)


def _by_group(groups: Groups) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yields each group that has rows, with the ascending indices of its rows."""
    if not len(groups):
        return
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    bounds = np.flatnonzero(np.diff(ordered)) + 1
    for rows in np.split(order, bounds):
        yield int(groups[rows[0]]), rows
