"""Deletes files that no checkpoint refers to, for the hosts of coordinator and tasks."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tidegate.storage.errors import StorageError
from tidegate.storage.files.store import Store

log = logging.getLogger(__name__)


def delete_files(store: Store, paths: Iterable[str]) -> None:
    """Delete these files. What cannot be deleted now is swept at the end of the job."""
    for path in paths:
        try:
            store.delete(path)
        except StorageError as error:
            log.warning("left %s behind for the sweep: %s", path, error)
