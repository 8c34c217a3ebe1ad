"""Common part of the formats of change data (CDC): events as new versions of rows, before an operator turns them into
changes.

A format of change data returns for each event the new version of a row, the keys of a deleted row, or a truncation of
the table. Events do not always have the previous version, and may be duplicated. `NewestRows`
(`tidegate/operators/ranking`) stores the newest row of each key, and emits the stream of changes that other steps use.
"""

from __future__ import annotations

import pyarrow as pa

from tidegate.storage.schemas.column_names import own_name

UPSERT, DELETE_ROW, TRUNCATE = "+U", "-D", "truncate"
"""Values of the column `row_kind`: a new version, a deletion by keys, and the deletion of all rows."""
ROW_KIND = "row_kind"
UNCHANGED = own_name("unchanged")
"""Name of the column that lists the columns whose values an event omits because they did not change."""


def version_schema(columns: pa.Schema) -> pa.Schema:
    """Returns the schema of row versions for a table with these columns: adds `row_kind` and `UNCHANGED`.

    All columns are nullable, because a deletion has only keys.
    """
    rows = [field.with_nullable(True) for field in columns]
    added = [pa.field(ROW_KIND, pa.string()), pa.field(UNCHANGED, pa.list_(pa.string()))]
    return pa.schema([*rows, *added])
