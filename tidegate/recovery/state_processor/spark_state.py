"""`read_state`: the state of a checkpoint as an Arrow table, or as a DataFrame whose partitions are key groups.

Rules with Spark:

- The driver reads metadata, and one chunk of each file to find the columns.
- Executors read and verify everything else through tidegate's store: each executor the key groups of its partitions.
- Files of RocksDB: a partition has the key groups of one former subtask, so that no database is downloaded twice.
- Operator state is one partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, overload

import pyarrow as pa
from fsspec.utils import get_protocol

from tidegate.recovery.state_reader import StateSelection, read_state_batches
from tidegate.storage.checkpoints.layout import CheckpointPointer, parse_pointer
from tidegate.storage.checkpoints.metadata import StateKind, read_pointed
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import OpenStore
from tidegate.storage.state.key_groups import key_group_range

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITIONS_PER_CORE = 2


@overload
def read_state(
    path: str,
    *,
    uid: str,
    state: str | None = None,
    keys: Sequence[str] | None = None,
    key_groups: range | None = None,
    spark: None = None,
    open_store: OpenStore = open_store,
) -> pa.Table: ...


@overload
def read_state(
    path: str,
    *,
    uid: str,
    state: str | None = None,
    keys: Sequence[str] | None = None,
    key_groups: range | None = None,
    spark: SparkSession,
    open_store: OpenStore = open_store,
) -> DataFrame: ...


def read_state(
    path: str,
    *,
    uid: str,
    state: str | None = None,
    keys: Sequence[str] | None = None,
    key_groups: range | None = None,
    spark: SparkSession | None = None,
    open_store: OpenStore = open_store,
) -> pa.Table | DataFrame:
    """Returns one state of one operator in a checkpoint or savepoint as an Arrow table.

    Each row is one key, key columns first. `path` is as for `inspect`. `state` may be omitted if the operator has only
    one. It may also be the name of one running aggregate, whose result is then the only column next to the keys. With
    `key_groups`, only the keys of these groups are read. `keys` names the key columns, which checkpoints of older
    versions do not always record.

    With `spark` it returns a lazy DataFrame: executors read it in parallel, by key group, and its columns have Spark's
    types. Without it the whole table must fit into memory; `read_state_batches` reads it in batches.

    Raises ConfigurationError for a wrong path, uid or state, and lists the existing ones; with `spark` also for a type
    that Spark lacks, or a checkpoint in memory. Also raises NotFoundError, CorruptionError, CodecError and StorageError
    from the store.
    """
    if spark is None:
        return read_state_batches(
            path, uid=uid, state=state, keys=keys, key_groups=key_groups, open_store=open_store
        ).read_all()
    return _dataframe(spark, path, uid, state, keys, key_groups, open_store)


def _dataframe(
    spark: SparkSession,
    path: str,
    uid: str,
    state: str | None,
    keys: Sequence[str] | None,
    key_groups: range | None,
    open_store: OpenStore,
) -> DataFrame:
    from tidegate.spark_bridge.dataframes.spark_types import for_spark, spark_schema_of
    from tidegate.spark_bridge.worker_python import refuse_connect, refuse_unfit_workers

    refuse_connect(spark, "read_state")
    refuse_unfit_workers(spark, "read_state")
    at = parse_pointer(path)
    if get_protocol(at.root) == "memory":
        raise ConfigurationError(
            f"Spark's executors cannot read {path}: they are other processes and do not see this one's memory. Read it "
            "with Arrow, or keep checkpoints in a folder or a bucket."
        )
    store = open_store(at.root)
    selection = StateSelection.find(store, read_pointed(store, at), uid, state, keys)
    schema = for_spark(selection.schema)
    parts = _parts(selection, key_groups, spark.sparkContext.defaultParallelism * PARTITIONS_PER_CORE)
    read = _reader(at, (uid, state, keys), schema, parts, open_store)
    # Each partition gets one row: its number.
    return spark.range(0, len(parts), 1, len(parts)).mapInArrow(read, spark_schema_of(selection.schema))


def _parts(selection: StateSelection, key_groups: range | None, wanted: int) -> list[range | None]:
    """Returns the range of key groups for each partition of the Spark DataFrame. None means the whole state."""
    if selection.info.kind is not StateKind.KEYED:
        return [None]
    groups = selection.key_groups if key_groups is None else key_groups
    operator = selection.operator
    if selection.info.backend is not None:
        owned = [
            key_group_range(subtask, operator.max_parallelism, operator.parallelism)
            for subtask in range(operator.parallelism)
        ]
        met = [range(max(own.start, groups.start), min(own.stop, groups.stop)) for own in owned]
        return [part for part in met if part] or [groups]
    count = max(1, min(len(groups), max(wanted, operator.parallelism)))
    cuts = [groups.start + number * len(groups) // count for number in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(cuts)]


def _reader(
    at: CheckpointPointer,
    named: tuple[str, str | None, Sequence[str] | None],
    schema: pa.Schema,
    parts: Sequence[range | None],
    open_store: OpenStore,
) -> Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]:
    """Returns the function that runs in Spark's Python workers. It reads the parts whose numbers it receives."""

    def read_parts(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        store = open_store(at.root)
        selection = StateSelection.find(store, read_pointed(store, at), *named)
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for rows in selection.batches(parts[number]):
                    columns = [column.cast(field.type) for column, field in zip(rows.columns, schema, strict=True)]
                    yield pa.RecordBatch.from_arrays(columns, schema=schema)

    return read_parts
