"""Reads a Spark DataFrame a batch at a time: executors write it to files, and the driver reads these.

To collect it would need memory for all of it in the driver. So it is staged like the input of a job, in a folder that
is deleted afterwards. `SavepointWriter.with_keyed_state` calls it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa
from fsspec.utils import get_protocol

from tidegate.recovery.contents.state_reader import BATCH_ROWS_MAX
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import join_url
from tidegate.storage.files.store import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from tidegate.spark_bridge.dataframes.parquet_source import ParquetSource


@contextmanager
def staged_rows(df: DataFrame, store: Store) -> Iterator[pa.RecordBatchReader]:
    """A reader of the rows, valid in the block; they are staged in a folder of `store`.

    ConfigurationError for a store that executors cannot see, or a type that cannot be stored; SparkBridgeError.
    """
    from tidegate.spark_bridge.dataframes.staging import stage_dataframe

    if get_protocol(store.url) == "memory":
        raise ConfigurationError(
            f"rows of a DataFrame cannot go into a savepoint at {store.url}: Spark's executors are other processes and "
            "do not see this one's memory. Name a folder or a bucket, or give an Arrow table"
        )
    folder = f"staging-{secrets.token_hex(4)}"
    try:
        source = stage_dataframe(df, join_url(store.url, folder))
        yield pa.RecordBatchReader.from_batches(source.schema, _batches(source))
    finally:
        store.delete_tree(folder)


def _batches(source: ParquetSource) -> Iterator[pa.RecordBatch]:
    reader = source.reader()
    try:
        for split in source.splits():
            offset, at_end = 0, False
            while not at_end:
                found = reader.read(split, offset, BATCH_ROWS_MAX)
                if found.batch is not None:
                    yield found.batch
                offset, at_end = found.next_offset, found.at_end
    finally:
        reader.close()
