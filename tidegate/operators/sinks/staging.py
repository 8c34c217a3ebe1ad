"""`StagingSink`: what the task machine asks of any sink: what is to be written now, and whether a checkpoint begins."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from tidegate.operators.operator import Operator


@dataclass(frozen=True, slots=True)
class StagedRows:
    """The rows of one file, in batches of one schema. `folder`: below the folder of the attempt; empty for none.

    `prepare`: a checkpoint begins after them, so a sink of the user's says what is to be committed.
    """

    folder: str
    batches: tuple[pa.RecordBatch, ...]
    prepare: bool = False


class StagingSink(Operator):
    """Buffers rows until they are taken. Emits nothing."""

    def take_files(self, force: bool) -> list[StagedRows]:
        """What to write now, one entry for each file: if there is enough for one or, with `force`, if there is any."""
        raise NotImplementedError
