"""Rules of output tables, broken: when what a table shows changes, and to what."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.files.store import Store
from tidegate.storage.ids import JobId
from tidegate.storage.tables import maintenance
from tidegate.storage.tables.log.claims import ClaimHistory
from tidegate.storage.tables.log.entries import TableEntry, TableFold, added
from tidegate.storage.tables.log.versions import LogRewrites
from tidegate.storage.tables.maintenance import Rewrite
from tidegate.storage.tables.table_info import TableInfo

Patch = Callable[[], AbstractContextManager[Any]]

_rewritten = maintenance.rewritten
_claimed, _committed, _compacted = TableFold._claimed, TableFold._committed, TableFold._compacted


def _shows_at_once(self: TableFold, entry: TableEntry) -> TableFold:
    assert entry.claim is not None
    return replace(_claimed(self, entry), shown=entry.claim.shows, rows=entry.claim.shows_rows)


def _shows_its_own_alone(self: TableFold, entry: TableEntry) -> TableFold:
    return replace(_committed(self, entry), shown=((entry.seq, entry.seq),))


def _shows_too_much(self: TableFold, entry: TableEntry) -> TableFold:
    return replace(_compacted(self, entry), shown=added(self.shown, entry.seq, self.newest_bearing))


def _for_whatever_is_covered_in_part(
    self: LogRewrites, members: Collection[int], line: JobId | None = None
) -> set[int]:
    found = set(members)
    for seq, replaced in self.replaced.items():
        if found.intersection(replaced):
            found.difference_update(replaced)
            found.add(seq)
    return found


def _never_decided(self: TableFold, url: str, checkpoint_id: int, files: tuple[object, ...]) -> bool:
    return not files and not self.switches


def _forgetful(
    store: Store,
    info: TableInfo,
    folder: str,
    prefix: str,
    rewrites: Sequence[Rewrite],
    may_go_on: Callable[[], None],
    *,
    from_beginning: bool,
) -> tuple[DataFile, ...]:
    """Breaks: a deletion is forgotten where nothing older can show. Here wherever files are put together."""
    from_beginning, rewrites = True, [replace(rewrite, is_first=True) for rewrite in rewrites]
    return _rewritten(store, info, folder, prefix, rewrites, may_go_on, from_beginning=from_beginning)


TABLE_PATCHES: dict[str, tuple[int, Patch]] = {
    "tables: a claim changes what is shown": (6, lambda: patch.object(TableFold, "_claimed", _shows_at_once)),
    "tables: the first commit replaces nothing": (
        6,
        lambda: patch.object(TableFold, "shown_next", property(lambda self: self.shown)),
    ),
    "tables: a commit hides those before it": (6, lambda: patch.object(TableFold, "_committed", _shows_its_own_alone)),
    "tables: a repeated commit is made again": (6, lambda: patch.object(TableFold, "is_decided", _never_decided)),
    "tables: a compaction hides nothing": (6, lambda: patch.object(TableFold, "_compacted", _shows_too_much)),
    "tables: a compaction stands for what a checkpoint covers in part": (
        6,
        lambda: patch.object(LogRewrites, "compacted", _for_whatever_is_covered_in_part),
    ),
    "tables: a deletion is forgotten while older rows may show": (
        6,
        lambda: patch.object(maintenance, "rewritten", _forgetful),
    ),
    "tables: a fallback takes nothing back": (6, lambda: patch.object(ClaimHistory, "_fallback", lambda *_: None)),
}
"""Broken by a patch: the invariant, and the patch."""

_CHANGES = {"topology": "changes", "mode": "exactly-once", "interval_ms": 60, "min_pause_ms": 0, "rows": 100}
TABLE_FIXED: dict[str, dict[str, str | int]] = {
    "tables: a fallback takes nothing back": {"faults": "damage", "retained": 3},
    "tables: a deletion is forgotten while older rows may show": _CHANGES,
    "tables: a compaction stands for what a checkpoint covers in part": {"faults": "damage", "retained": 3},
}
"""A job falls back only where checkpoints are damaged, and another one is there."""
