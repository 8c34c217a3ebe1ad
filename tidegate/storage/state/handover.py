"""`Handover`: stored tables on their way to the operator that is restored from them.

Rule: a table is held until it has been taken in, and no longer. So a restore never holds a state twice: what is left of
the tables shrinks as the backend grows. Whoever takes tables in first looks at what it needs of all of them, and then
goes through `taken`, once. Nobody else keeps a reference to a table. Tables that wait on this machine's disk
(`spool.py`) show as one table without rows, and come one by one when they are taken in.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import overload

import pyarrow as pa

from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.state.snapshot import StateTable
from tidegate.storage.state.spool import SpooledTables

TOGETHER_BYTES_MAX = 1 << 26
"""Of tables that are put together. A column of strings takes 2 GiB at most, and rows may be large."""


class Handover(Sequence[StateTable]):
    """The tables that have not been taken in yet."""

    __slots__ = ("_left",)

    def __init__(self, tables: Iterable[StateTable | SpooledTables] = ()) -> None:
        self._left = deque(tables)

    def __len__(self) -> int:
        return len(self._left)

    @overload
    def __getitem__(self, index: int) -> StateTable: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[StateTable]: ...
    def __getitem__(self, index: int | slice) -> StateTable | Sequence[StateTable]:
        return tuple(map(_shown, self._left))[index] if isinstance(index, slice) else _shown(self._left[index])

    def __iter__(self) -> Iterator[StateTable]:
        return map(_shown, self._left)

    def __repr__(self) -> str:
        return f"Handover({list(self._left)!r})"

    def take(self) -> Iterator[StateTable]:
        """Each table in its order, let go of when the next one is asked for."""
        while self._left:
            first = self._left[0]
            if isinstance(first, SpooledTables):
                self._left.popleft()
                yield from first.take()
            else:
                del first  # a name for the table would hold it for as long as it is taken in
                yield self._next()

    def _next(self) -> StateTable:
        table = self._left.popleft()
        assert isinstance(table, StateTable)
        return table


def _shown(tables: StateTable | SpooledTables) -> StateTable:
    return tables.head if isinstance(tables, SpooledTables) else tables


def keys_at_most(tables: Iterable[StateTable]) -> int:
    """How many keys tables put at most that are in memory: the rows of the state which has the most, in layer 0."""
    rows: Counter[str] = Counter()
    for table in tables:
        if table.kind is StateKind.KEYED and not table.removed and table.layer == 0:
            rows[table.state] += table.rows.num_rows
    return max(rows.values(), default=0)


def put_together(tables: Iterable[StateTable], rows_max: int) -> Iterator[StateTable]:
    """Neighbours of one state, kind, layer and schema as one table of at most `rows_max` rows and some megabytes.

    A larger one stays as it is. So what is stored in many chunks is taken in with few steps. So many rows are held
    twice meanwhile.
    """
    group: list[StateTable] = []
    rows = size_bytes = 0
    for table in tables:
        rows, size_bytes = rows + table.rows.num_rows, size_bytes + table.rows.nbytes
        if group and not (_alike(group[0], table) and rows <= rows_max and size_bytes <= TOGETHER_BYTES_MAX):
            yield _together(group)
            rows, size_bytes = table.rows.num_rows, table.rows.nbytes
        group.append(table)
        del table  # a name for the table would hold it for as long as it is taken in
    if group:
        yield _together(group)


def _alike(one: StateTable, other: StateTable) -> bool:
    same = (one.state, one.kind, one.removed, one.layer) == (other.state, other.kind, other.removed, other.layer)
    return same and bool(one.rows.schema.equals(other.rows.schema, check_metadata=True))


def _together(group: list[StateTable]) -> StateTable:
    """The tables of a group as one; the group is empty then."""
    first = group[0]
    if len(group) > 1:
        first = replace(first, rows=pa.concat_batches([table.rows for table in group]))
    group.clear()
    return first


def taken(tables: Sequence[StateTable]) -> Iterator[StateTable]:
    """Tables to take in: of a `Handover` each is gone afterwards; other sequences stay what they are."""
    return tables.take() if isinstance(tables, Handover) else iter(tables)
