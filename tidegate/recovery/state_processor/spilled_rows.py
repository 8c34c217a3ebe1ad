"""Keeps rows of a keyed state in local files, on their way into a savepoint, if memory should not hold them all.

They come batch by batch, in their stored form, and are spread over files: one for each run of key groups. So the rows
of a key group are in one file, which is read, checked and sorted on its own. Memory holds one batch on the way in, and
one file on the way out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.storage.errors import StorageError

FILES_MAX = 64

Groups = Callable[[pa.RecordBatch], NDArray[np.uint16]]
"""The key group of each row."""


class SpilledRows:
    """Rows in their stored form, all of one `schema`, in files below `folder`."""

    def __init__(self, folder: str, schema: pa.Schema, max_parallelism: int) -> None:
        self.schema = schema
        self._folder = folder
        files = min(FILES_MAX, max_parallelism)
        self._starts = np.arange(files + 1) * max_parallelism // files
        """The first key group of each file, and the end of the last one."""

    def take_in(self, batches: Iterable[pa.RecordBatch], groups: Groups) -> None:
        """Write all rows. StorageError if the folder cannot be used."""
        try:
            with ExitStack() as stack:
                writers: dict[int, pa.ipc.RecordBatchStreamWriter] = {}
                for batch in batches:
                    number = np.searchsorted(self._starts, groups(batch), side="right") - 1
                    order = np.argsort(number, kind="stable")
                    ends = np.searchsorted(number[order], np.arange(len(self._starts)))
                    rows = batch.take(pa.array(order))
                    for file in np.unique(number).tolist():
                        if file not in writers:
                            sink = stack.enter_context(pa.OSFile(self._path(file), "wb"))
                            writers[file] = stack.enter_context(pa.ipc.new_stream(sink, self.schema))
                        writers[file].write_batch(rows.slice(int(ends[file]), int(ends[file + 1] - ends[file])))
        except OSError as error:
            raise StorageError(f"cannot keep rows in {self._folder}: {error}. Free some space there") from error

    def tables(self, owned: range) -> Iterator[pa.Table]:
        """The rows of each file that has some of these key groups (and perhaps others), in the order of key groups."""
        for file, (first, end) in enumerate(zip(self._starts[:-1], self._starts[1:], strict=True)):
            path = self._path(file)
            if first < owned.stop and owned.start < end and os.path.exists(path):
                with pa.OSFile(path) as source, pa.ipc.open_stream(source) as reader:
                    yield reader.read_all()

    def _path(self, file: int) -> str:
        return os.path.join(self._folder, f"{file:03d}.arrow")
