"""`NewestSales`: an aggregate of the program's own, for q6: the mean price of the newest ten sales of a seller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

import tidegate as tg

SALES = 10
_SALE = pa.struct({"time": pa.timestamp("ms"), "auction": pa.int64(), "price": pa.int64()})
_SCHEMA = pa.schema([("group", pa.int64()), *((field.name, field.type) for field in _SALE)])
_NAMES = _SCHEMA.names[1:]


class NewestSales(tg.BatchAggregateFunction):
    """Of columns time, auction and price. A sale is taken back when a higher bid comes, so all are kept."""

    state = pa.schema({"sales": pa.list_(_SALE)})
    output = pa.float64()

    def accumulate(self, state: pa.RecordBatch, groups: NDArray[np.int64], *columns: pa.Array) -> Mapping[str, Any]:
        """Add sales."""
        return _state(pl.concat([_held(state), _rows(groups, *columns)]), state.num_rows)

    def retract(self, state: pa.RecordBatch, groups: NDArray[np.int64], *columns: pa.Array) -> Mapping[str, Any]:
        """Take sales out."""
        left = _held(state).join(_rows(groups, *columns), on=_SCHEMA.names, how="anti")
        return _state(left, state.num_rows)

    def merge(self, state: pa.RecordBatch, groups: NDArray[np.int64], other: pa.RecordBatch) -> Mapping[str, Any]:
        """Add the sales of others."""
        more = _held(other)
        more = more.with_columns(group=pl.Series(groups).gather(more["group"]))
        return _state(pl.concat([_held(state), more]), state.num_rows)

    def result(self, state: pa.RecordBatch) -> pa.Array:
        """The mean of the newest of each seller."""
        newest = _held(state).sort("group", "time", "auction").group_by("group").tail(SALES)
        means = newest.group_by("group").agg(pl.col("price").mean())
        return _of_all(means, state.num_rows)["price"].to_arrow()


def _held(state: pa.RecordBatch) -> pl.DataFrame:
    """The sales of a state, each with its group."""
    sales = state.column("sales")
    groups = np.repeat(np.arange(len(sales)), sales.value_lengths().fill_null(0).to_numpy())
    return _rows(groups, *sales.flatten().flatten())


def _rows(groups: NDArray[np.int64], *columns: pa.Array) -> pl.DataFrame:
    frame = pl.from_arrow(pa.table([pa.array(groups, pa.int64()), *columns], schema=_SCHEMA))
    assert isinstance(frame, pl.DataFrame)
    return frame


def _state(sales: pl.DataFrame, groups: int) -> Mapping[str, Any]:
    lists = sales.group_by("group").agg(sales=pl.struct(_NAMES))
    return {"sales": _of_all(lists, groups)["sales"].to_arrow().cast(pa.list_(_SALE))}


def _of_all(rows: pl.DataFrame, groups: int) -> pl.DataFrame:
    """A row for each group, in order; null where there was none."""
    return pl.DataFrame({"group": range(groups)}).join(rows, on="group", how="left", maintain_order="left")
