"""`Unwritten`: rows of a snapshot that are not in the database yet, and what is done once they are.

A freeze makes one, so that its cost does not grow with the rows. The thread that writes the snapshot writes them beside
processing. Rules:
- Whoever comes first does it: the writer of the snapshot, or the task, which calls `settle` before it writes anything
  else to the database. So the database is then what it was to be at the freeze, whoever that is.
- Rows are written whether somebody still wants the snapshot or not: nobody else has them. A fault there is told to
  everybody who comes, for the database lacks rows then.
- A fault in what is done with the snapshot is told to its writer alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from tidegate.storage.errors import StorageError

Step = Callable[[], None]


class Unwritten:
    """`rows` writes them, a part with each item drawn. Then `use` makes what the snapshot needs, if it is wanted.

    With `beside` there are no rows, and other writes need not wait if there is room for them (`overlap.py`).
    """

    def __init__(self, rows: Iterable[object], use: Step, beside: bool = False) -> None:
        self.beside = beside
        self._lock = threading.Lock()
        self._rows: Iterable[object] | None = rows
        self._use: Step | None = use
        self._lost: Exception | None = None
        self._unused: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether nothing is left to do. Another thread may be doing it, if not."""
        return self._rows is None and self._use is None

    def take(self) -> None:
        """For the writer of the snapshot: when this returns, what it needs is there. StorageError, CorruptionError."""
        with self._lock:
            self._write()
            if self._unused is not None:
                raise self._unused

    def settle(self) -> None:
        """For the task: when this returns, it may write to the database. StorageError, CorruptionError."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        if self._lost is not None:
            raise type(self._lost)(str(self._lost)) from self._lost
        if self._rows is not None:
            try:
                for _ in self._rows:
                    pass
            except Exception as error:
                self._lost = error
                raise
            self._rows = None
        if self._use is not None:
            try:
                self._use()
            except StorageError as error:
                self._unused = error
            finally:
                self._use = None
