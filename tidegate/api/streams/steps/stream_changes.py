"""`StreamChanges`: the method that makes a stream of changes out of rows that say themselves what they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import pyarrow as pa

from tidegate.api.streams.steps.known_columns import known_schema
from tidegate.api.streams.steps.stream_steps import StreamSteps
from tidegate.api.streams.steps.updating import Updating
from tidegate.operators.aggregates.column_expressions import column_names
from tidegate.operators.changes import CHANGE
from tidegate.storage.errors import ConfigurationError


class StreamChanges(StreamSteps):
    """A stream whose rows may be changes that something else has recorded."""

    def as_changes(self, keys: Sequence[str]) -> Self:
        """Take rows for changes: `row_kind` says whether one comes (`+I`, `+U`) or is taken back (`-U`, `-D`).

        `keys` are columns that tell rows apart, and by which they come in order: all rows of a key are in one split. A
        row that is taken back must be equal to the one that had come. ConfigurationError.
        """
        if self._updating is not None:
            raise self._updating.refuse("as_changes")
        keys = column_names(keys, "as_changes(keys=...)")
        schema = known_schema(self, "as_changes")
        missing = [name for name in (*keys, CHANGE) if name not in schema.names]
        if missing or not keys or CHANGE in keys:
            raise ConfigurationError(
                f"as_changes(keys={list(keys)}): it needs at least one key and the column {CHANGE!r}; the stream has "
                f"{schema.names}"
            )
        found = schema.field(CHANGE).type
        if not pa.types.is_string(found):
            raise ConfigurationError(f"as_changes: column {CHANGE!r} is {found}; it must be string")
        made_by = f"as_changes({list(keys)})"
        updating = Updating(keys, made_by, changes=True, recorded=True)
        return type(self)(self._program, self._inputs, (), self.timestamp, updating)
