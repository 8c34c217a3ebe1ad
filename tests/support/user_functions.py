"""Aggregate functions as programs write them, and what they are in plain Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.operators.aggregates.aggregate_function import BatchAggregateFunction, Groups, NewState


class Product(BatchAggregateFunction):
    """The product of integers, modulo a prime so that none is too large; it takes rows back."""

    state = pa.schema({"product": pa.int64(), "zeros": pa.int32()})
    output = pa.int64()
    initial: ClassVar = {"product": 1, "zeros": 0}
    prime = 10_007

    def accumulate(self, state: pa.RecordBatch, groups: Groups, *columns: pa.Array) -> NewState:
        """Multiply."""
        return self._times(state, groups, columns[0], 1)

    def retract(self, state: pa.RecordBatch, groups: Groups, *columns: pa.Array) -> NewState:
        """Divide."""
        return self._times(state, groups, columns[0], -1)

    def _times(self, state: pa.RecordBatch, groups: Groups, column: pa.Array, sign: int) -> NewState:
        products, zeros = (array.to_numpy().copy() for array in state.columns)
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        values = column.fill_null(1).to_numpy().astype(np.int64) % self.prime
        np.add.at(zeros, groups, sign * ((values == 0) & valid).astype(np.int32))
        for group, value in zip(groups.tolist(), values.tolist(), strict=True):
            products[group] = products[group] * pow(value or 1, sign, self.prime) % self.prime
        return {"zeros": zeros, "product": products}

    def merge(self, state: pa.RecordBatch, groups: Groups, other: pa.RecordBatch) -> NewState:
        """Multiply products."""
        merged = self._times(state, groups, other.column("product"), 1)
        zeros: NDArray[np.int32] = state.column("zeros").to_numpy().copy()
        np.add.at(zeros, groups, other.column("zeros").to_numpy())
        return {"product": merged["product"], "zeros": zeros}

    def result(self, state: pa.RecordBatch) -> Any:
        """0 if there is a zero."""
        return np.where(state.column("zeros").to_numpy() > 0, 0, state.column("product").to_numpy())

    def of_rows(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """The same in plain Python, of the column i."""
        product = 1
        for row in rows:
            product = product * (1 if row["i"] is None else row["i"]) % self.prime
        return product


class Longest(BatchAggregateFunction):
    """The longest text, with a name of the same row; its state has strings, lists and nulls."""

    state = pa.schema({"best": pa.struct({"text": pa.string(), "name": pa.string()}), "lengths": pa.list_(pa.int64())})
    output = pa.string()

    def accumulate(self, state: pa.RecordBatch, groups: Groups, *columns: pa.Array) -> NewState:
        """One group after the other: what this shows is state of any type, not speed."""
        rows = zip(groups.tolist(), *(column.to_pylist() for column in columns), strict=True)
        return self._better(state, [(group, {"text": text, "name": name}) for group, text, name in rows])

    def merge(self, state: pa.RecordBatch, groups: Groups, other: pa.RecordBatch) -> NewState:
        """The same of the best texts of others."""
        return self._better(state, list(zip(groups.tolist(), other.column("best").to_pylist(), strict=True)))

    def _better(self, state: pa.RecordBatch, rows: Sequence[tuple[int, Any]]) -> NewState:
        best, lengths = state.column("best").to_pylist(), state.column("lengths").to_pylist()
        for group, found in rows:
            if (
                found is not None
                and found["text"] is not None
                and (best[group] is None or len(found["text"]) > len(best[group]["text"]))
            ):
                best[group] = found
                lengths[group] = [len(found["text"])]
        arrays = [pa.array(best, self.state.field(0).type), pa.array(lengths, self.state.field(1).type)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.state)

    def result(self, state: pa.RecordBatch) -> Any:
        """Text, length and name."""
        best = state.column("best")
        length = pc.list_element(state.column("lengths").fill_null(pa.scalar([0], pa.list_(pa.int64()))), 0)
        name = pc.fill_null(best.field("name"), "?")
        joined = pc.binary_join_element_wise(best.field("text"), length.cast(pa.string()), name, " ")
        return pc.if_else(best.is_valid(), joined, None)

    def of_rows(self, rows: Sequence[Mapping[str, Any]]) -> str | None:
        """The same in plain Python, of the columns text and name."""
        known = [row for row in rows if row["text"] is not None]
        if not known:
            return None
        best = max(known, key=lambda row: len(row["text"]))
        return f"{best['text']} {len(best['text'])} {best['name'] or '?'}"
