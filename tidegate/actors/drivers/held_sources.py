"""`HeldSources`: whether the sources of a job are to read nothing for now.

What a job commits may be handed on to somebody who is slower than the job (`tidegate/storage/tables/handed_rows.py`).
Whoever hands it on says so by a file beside the table. Sources then answer that there is nothing new: barriers pass, so
checkpoints complete, and what is on its way is committed; but nothing is added to what waits.

While storage does not answer, what was known last counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from tidegate.storage.errors import StorageError
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import JobId

log = logging.getLogger(__name__)

LOOK_MS = 250
"""Between two looks."""
HELD_S = 0.05
"""How long a read waits before it says that there is nothing."""


class HeldSources:
    """Looks beside the tables of one job at these urls. Used by the thread that reads a source."""

    def __init__(self, open_store: OpenStore, urls: Sequence[str], job_id: JobId, now_ms: Callable[[], int]) -> None:
        self._open_store = open_store
        self._urls = urls
        self._job_id = job_id
        self._now_ms = now_ms
        self._looked_at_ms: int | None = None
        self._held = False

    def wait(self) -> bool:
        """Whether the sources are held back now; it takes a moment then, so that nobody asks all the time."""
        if self._urls:
            self._look()
        if self._held:
            time.sleep(HELD_S)
        return self._held

    def _look(self) -> None:
        now_ms = self._now_ms()
        if self._looked_at_ms is not None and 0 <= now_ms - self._looked_at_ms < LOOK_MS:
            return
        self._looked_at_ms = now_ms
        # What logs of tables are made of is loaded by those who have such a table.
        from tidegate.storage.tables.handed_rows import hold_path

        path = hold_path(self._job_id)
        try:
            self._held = any(self._open_store(url).exists(path) for url in self._urls)
        except StorageError as error:
            log.warning("whether the sources are held back is not known, so they go on as before: %s", error)
