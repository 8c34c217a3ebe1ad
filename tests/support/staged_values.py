"""Values in files of a log, staged as Spark's executors do it."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from tidegate.connectors.staged_parquet import FileLimits, StagedFile, write_files
from tidegate.storage.files.store import Store

LIMITS = FileLimits(rows_per_group=4)


def stage_values(
    store: Store, folder: str, files: Sequence[Sequence[int]], schema: pa.Schema
) -> tuple[StagedFile, ...]:
    """Stage values of the one column, a sequence for each part."""
    return tuple(
        staged
        for number, values in enumerate(files)
        for staged in write_files(
            store,
            f"{folder}/part-{number:06d}",
            [pa.record_batch({schema.names[0]: list(values)}, schema)],
            schema,
            LIMITS,
        )
    )
