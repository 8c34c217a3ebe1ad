"""Applies the layers of a keyed state to one another, in columns: of each key the newest layer counts.

This is for who reads state as data. A job that restores applies layers to its own tables instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from tidegate.storage.schemas.plain_types import comparable
from tidegate.storage.state.snapshot import StateTable


def newest_rows(tables: Sequence[StateTable], keys: Sequence[str], schema: pa.Schema) -> pa.Table:
    """The rows that tables of one state stand for, given in the order of their layers.

    `schema` is that of all tables with rows; `removed` tables have the columns `keys` alone. Rows come in the order of
    the tables. Needs memory for all of them once more.
    """
    put = pa.Table.from_batches([table.rows for table in tables if not table.removed], schema)
    told = [table.rows.select(list(keys)) for table in tables]
    rows = sum(part.num_rows for part in told)
    if rows == 0:
        return put
    names = [str(number) for number in range(len(keys))]
    columns = pa.Table.from_batches(told).rename_columns(names)
    columns = pa.table([comparable(column) for column in columns.columns], names=names)
    numbered = columns.append_column("row", pa.array(np.arange(rows, dtype=np.int64)))
    newest = np.sort(numbered.group_by(names).aggregate([("row", "max")]).column("row_max").to_numpy())
    is_put = np.repeat([not table.removed for table in tables], [part.num_rows for part in told])
    place = np.cumsum(is_put) - 1
    return put.take(pa.array(place[newest[is_put[newest]]]))
