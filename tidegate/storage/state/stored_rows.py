"""Rows of row tables as they are stored: key columns, a number that tells rows of one key apart, value columns."""

from __future__ import annotations

import pyarrow as pa

from tidegate.storage.schemas.reserved_names import own_name

ROW_SEQUENCE = own_name("row_sequence")
"""Name of the column of numbers. Of the rows of one key, one that came later has a greater number."""

SEQUENCE_FIELD = pa.field(ROW_SEQUENCE, pa.int64())


def row_identity(keys: pa.Schema) -> pa.Schema:
    """The columns that tell a row from all others, for some key columns."""
    return pa.schema([*keys, SEQUENCE_FIELD])
