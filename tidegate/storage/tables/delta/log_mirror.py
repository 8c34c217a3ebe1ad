"""`LogMirror`: shows as a Delta Lake table what a table's log shows, and knows which change leads there.

`TableLog` calls it. `delta_mirror.py` makes the transaction. Of the log it reads the parts with the entries that have
come or gone since. The whole of it is read after a restart.
"""

from __future__ import annotations

from collections.abc import Collection

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import TableError
from tidegate.storage.tables.delta.delta_mirror import DeltaChange, DeltaMirror
from tidegate.storage.tables.log.log_entries import Ranges, TableClaim, TableEntry, covers, without
from tidegate.storage.tables.log.log_fold import TableFold
from tidegate.storage.tables.log.log_tail import TableTail
from tidegate.storage.tables.log.log_versions import TableVersions
from tidegate.storage.tables.table_info import IfExists, TableInfo


class LogMirror:
    """The Delta table of the table at `url`, whose log's end is `tail`. Not thread-safe."""

    def __init__(self, url: str, info: TableInfo, tail: TableTail) -> None:
        self.info = info
        self._url = url
        self._tail = tail
        self._delta = DeltaMirror(url, info)
        self._known: tuple[int, Ranges] | None = None
        """An entry that Delta shows, or showed, and what the log shows with it."""

    def create(self, history_ms: int | None = None) -> None:
        """Make the Delta table; see `DeltaMirror.create`."""
        self._delta.create(history_ms)

    def retention_ms(self) -> int:
        """See `DeltaMirror.retention_ms`."""
        return self._delta.retention_ms()

    def check(self, if_exists: IfExists = "append", claim: TableClaim | None = None) -> None:
        """Raise what `create` would raise, and TableError where the job would find rows that no entry of the log has.

        "append": it is to add to them, or was restored. `claim`: the one that the job is about to make; TableError
        where files of the Delta table would have to be hidden with it and cannot be.
        """
        self._delta.check()
        if claim is not None:
            shows = claim.shows
            self._delta.check_hides(lambda since: self._tail.with_parts(lambda: self._change(since, shows)))
        if if_exists == "append":
            return
        own: Collection[str] = ()
        if self._tail.fold is not None:
            entries = self._tail.with_parts(lambda: self._tail.entries_after(-1))
            own = {file.path for entry in entries for file in entry.files}
        if count := self._delta.foreign_files(own):
            raise TableError(
                f"the Delta table at {self._url} has {count} files that tidegate has not written, and cannot "
                f'replace; if_exists="{if_exists}" refuses them: empty it first, or add to it with if_exists="append"'
            )

    def follow(self) -> None:
        """Take the Delta table to what the log shows. StorageError: repeat it; TableError where that cannot help."""
        fold = self._fold
        # What the table shows may be what it has shown before, and others have mirrored in between: the entry tells.
        if self._known is not None and self._known[0] == fold.seq:
            return
        self._delta.show(lambda since: self._tail.with_parts(lambda: self._change(since)))
        self._known = (fold.seq, fold.shown)

    @property
    def _fold(self) -> TableFold:
        assert self._tail.fold is not None
        return self._tail.fold

    def needed_files(self, since_ms: int) -> set[str]:
        """See `DeltaMirror.needed_files`."""
        return self._delta.needed_files(since_ms)

    def _change(self, since: int | None, shows: Ranges | None = None) -> DeltaChange | None:
        """What leads from entry `since` to what the log shows, or to `shows`, which a claim is about to make of it."""
        fold = self._fold
        if shows is None:
            if since is not None and since >= fold.seq:
                return None
            shows = fold.shown
        before = self._shown_after(since)
        new = self._tail.entries_in(without(shows, before))
        gone = self._tail.entries_in(without(before, shows))
        added, removed = _files(new), _files(gone)
        # A compaction names large files again: these stay.
        paths = {file.path for file in added} & {file.path for file in removed}
        added = tuple(file for file in added if file.path not in paths)
        removed = tuple(file for file in removed if file.path not in paths)
        if not (added or removed):
            return None
        return DeltaChange(fold.seq, fold.newest_at_ms or 0, added, removed, self._is_compaction(new, gone))

    def _shown_after(self, since: int | None) -> Ranges:
        if since is None:
            return ()
        if self._known is not None and self._known[0] == since:
            return self._known[1]
        return TableVersions(self._url, self._tail.entries_after(-1), self._fold).shown_after(since)

    def _is_compaction(self, new: list[TableEntry], gone: list[TableEntry]) -> bool:
        """Whether the change is that of one compaction, so that readers of changes need not be told."""
        if len(new) != 1 or self._fold.claim is None:
            return False
        rewrite = new[0].rewrite
        replaced = self._fold.claim.replaces if rewrite is None else rewrite.replaces
        rows = sum(entry.rows for entry in gone)
        return rows == new[0].rows and all(covers(replaced, entry.seq) for entry in gone)


def _files(entries: list[TableEntry]) -> tuple[DataFile, ...]:
    return tuple(file for entry in entries for file in entry.files)
