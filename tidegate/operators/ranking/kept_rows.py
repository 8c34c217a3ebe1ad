"""`KeptRows`: the one table in which an operator keeps something for each key, through restores and rescaling.

Rules:

- The table is made from the first batch, or from what a checkpoint has. Its columns must be the same then.
- Each new key is checked for its owner, and each key that is restored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.operator import OperatorContext
from tidegate.operators.state.keys import check_owner, key_columns, key_schema
from tidegate.operators.state.operator_backend import frozen_backend, make_backend
from tidegate.protocol.errors import ChangedTypeError
from tidegate.state.common.backend import KeyedBackend, ValueSpec, VectorTable
from tidegate.state.kernels.partition import gather, subtask_table
from tidegate.state.key_index.hash_table import Upserted
from tidegate.storage.errors import ConfigurationError, CorruptionError
from tidegate.storage.schemas.columns_text import columns_text
from tidegate.storage.schemas.evolution import migrated
from tidegate.storage.state.handover import keys_at_most, put_together, taken
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable

_RESTORED_ROWS = 131_072
"""Stored rows that are loaded at once."""


class KeptRows:
    """One state of fixed-width columns, `state`, for the keys in the columns `keys`. All values begin as 0."""

    def __init__(self, context: OperatorContext, state: str, keys: tuple[str, ...]) -> None:
        self.backend: KeyedBackend = make_backend(context, keys)
        self.table: VectorTable | None = None
        """None before the first key."""
        self.changed_rows = 0
        """Rows that were changed since the last snapshot; a row counts once for each batch that changed it."""
        self._context = context
        self._state = state
        self._keys = keys
        self._owners = subtask_table(context.max_parallelism, context.parallelism)
        self._schema: pa.Schema | None = None
        self._seen: pa.Schema | None = None
        stored = self.backend.stored_schema(state)
        if stored is not None:
            self._create(stored)

    @property
    def changed_bytes(self) -> int:
        """About how many bytes have changed since the last snapshot: 8 for each column of a row."""
        return self.changed_rows * 8 * (0 if self._schema is None else len(self._schema))

    def admit(self, schema: pa.Schema, fields: Sequence[pa.Field]) -> VectorTable:
        """The table for batches of a schema, with these value columns; the first batch ever makes it.

        OperatorError if the columns are not those of the table.
        """
        if self.table is not None and self._seen is not None and schema.equals(self._seen):
            return self.table
        wanted = pa.schema([*key_schema(schema, self._keys), *fields])
        if self._schema is None:
            self._create(wanted)
        elif wanted.names == self._schema.names and not wanted.equals(self._schema) and self._seen is None:
            self._retype(wanted)
        elif not wanted.equals(self._schema):
            raise ChangedTypeError(
                f"operator {self._context.name!r} (uid {self._context.uid!r}) keeps {columns_text(self._schema)}, but "
                f"the batch needs {columns_text(wanted)}: a column has changed its type; cast it with with_columns "
                "before key_by, or give the operator a new uid to start without what is kept"
            )
        self._seen = schema
        assert self.table is not None
        return self.table

    def upsert(self, batch: pa.RecordBatch, new_only: bool = False) -> Upserted:
        """Begin a batch, as `VectorTable.upsert`: the slots of its keys. OperatorError for one of another subtask."""
        assert self.table is not None
        keys = key_columns(batch, self._keys)
        upserted = self.table.upsert(keys, new_only)
        if len(upserted.new_rows):
            check_owner(self._context, gather(keys, upserted.new_rows), self._owners)
        self.changed_rows += len(upserted.new_rows if new_only else upserted.first_rows)
        return upserted

    def snapshot(self, cut: Cut) -> OperatorSnapshot:
        """Freeze the state."""
        if cut.keyed:
            self.changed_rows = 0
        return frozen_backend(self._context, self.backend, cut)

    def load(self, tables: Sequence[StateTable]) -> None:
        """Take in stored tables.

        CorruptionError if one has a key twice or of another subtask, ConfigurationError if it has other columns.
        """
        stored = [table.rows.schema for table in tables if not table.removed]
        if stored and self.table is None:
            self._create(stored[-1])
        if self.table is None:
            return  # nothing but removed keys, which are in no layer below
        assert self._schema is not None
        self.backend.expect(keys_at_most(tables))
        try:
            for table in put_together(taken(tables), _RESTORED_ROWS):
                self._check_keys(table.rows.schema, table.state)
                check_owner(self._context, table.rows.select(list(self._keys)), self._owners)
                rows = table.rows if table.removed else self._migrated(table.rows)
                self.backend.load(replace(table, rows=rows))
            self.backend.loaded()
        except CorruptionError as error:
            raise CorruptionError(f"operator {self._context.uid!r}: {error}") from error

    def _create(self, stored: pa.Schema) -> None:
        stored = stored.remove_metadata()
        self._check_keys(stored, self._state)
        self.table = self.backend.table(self._state, self._specs(stored))
        self.backend.fix_keys(pa.schema([pa.field(name, stored.field(name).type) for name in self._keys]))
        self._schema = stored

    def _retype(self, wanted: pa.Schema) -> None:
        """The first batch since the restore has other types than what is stored: convert that."""
        before, self._schema = self._schema, wanted
        assert before is not None
        if any(before.field(name).type != wanted.field(name).type for name in self._keys):
            raise ChangedTypeError(
                f"operator {self._context.name!r} (uid {self._context.uid!r}) keeps {columns_text(before)}, and a key "
                f"column has another type now: {columns_text(wanted)}; cast it with with_columns before key_by"
            )
        self.table = self.backend.retype(self._state, self._specs(wanted), self._migrated)

    def _migrated(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        assert self._schema is not None
        rows = rows.replace_schema_metadata(None)
        return migrated(rows, self._schema, self._state, self._context.uid)

    def _specs(self, schema: pa.Schema) -> list[ValueSpec]:
        return [ValueSpec(field.name, field.type, 0) for field in list(schema)[len(self._keys) :]]

    def _check_keys(self, schema: pa.Schema, state: str) -> None:
        names = schema.names[: len(self._keys)]
        if state != self._state or tuple(names) != self._keys:
            raise ConfigurationError(
                f"operator {self._context.uid!r} keeps {self._state!r} for the keys {list(self._keys)}, but the "
                f"checkpoint has {state!r} with the columns {schema.names}; restore with the program that wrote it, or "
                "change the uid"
            )


def flags_of(rows: NDArray[np.int32], count: int) -> NDArray[np.uint8]:
    """One byte for each of `count` rows of a batch, 1 for those that are named."""
    flags = np.zeros(count, dtype=np.uint8)
    flags[rows] = 1
    return flags
