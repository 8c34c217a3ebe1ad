"""The common part of formats of change data: rows as newest versions, before an operator makes changes of them.

A format of change data gives, for each event, the newest version of a row, or the keys of a deleted row, or a truncated
table. Events do not always have the version before, and some come twice. `NewestRows` (`tidegate/operators/ranking`)
keeps the newest row of each key, and makes the stream of changes that other steps take.
"""

from __future__ import annotations

import pyarrow as pa

from tidegate.storage.schemas.column_names import own_name

UPSERT, DELETE_ROW, TRUNCATE = "+U", "-D", "truncate"
"""Values of the column `row_kind`: a new version, a deletion by keys, and the deletion of all rows."""
ROW_KIND = "row_kind"
UNCHANGED = own_name("unchanged")
"""Name of the column that lists the columns of which an event has no value, because it is the same as before."""


def version_schema(columns: pa.Schema) -> pa.Schema:
    """Returns the columns of newest versions of rows with these columns.

    All may be null, because a deletion has keys only.
    """
    rows = [field.with_nullable(True) for field in columns]
    added = [pa.field(ROW_KIND, pa.string()), pa.field(UNCHANGED, pa.list_(pa.string()))]
    return pa.schema([*rows, *added])
