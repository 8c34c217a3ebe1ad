"""A function of batches whose process is killed at some rows, once for each."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path

import pyarrow as pa


def dies_at(values: Collection[int], folder: Path) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Returns a function that kills its process when it first sees one of these values in the column `x`.

    A file `killed-<x>` in the folder shows that it has.
    """

    def dies(batch: pa.RecordBatch) -> pa.RecordBatch:
        for x in batch.column("x").to_pylist():
            flag = folder / f"killed-{x}"
            if x in values and not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return batch

    return dies
