"""`columns_text`: names and types of columns, as they stand in errors of every room."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa


def columns_text(fields: Iterable[pa.Field]) -> str:
    """Columns in words, of a schema or of some fields: `(user: string, n: int64)`."""
    return "(" + ", ".join(f"{field.name}: {field.type}" for field in fields) + ")"
