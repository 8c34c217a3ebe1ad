"""`DataFrameSource`: a bounded DataFrame as a source. `stage_dataframe` writes its rows to Parquet files.

A DataFrame that only reads Parquet files is read directly from them (`files_in_place.py`), if that certainly gives the
same rows.

Any other DataFrame describes a computation: a second run may give other rows, or another order. A job must be able to
read its input again, so Spark's executors first write the rows to files (staging). Rules:

* Executors write through tidegate's own store (any URL that `open_store` accepts). So S3 needs no Hadoop jars.
* Each attempt of a Spark task has its own file names. Only files that a successful attempt has reported count. Files
  of other attempts in the folder are deleted.
* At the end, one conditional create of the manifest turns the folder into a source.
* The one Spark action has a time limit, and ends when Spark has lost its driver or all executors.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict

import pyarrow as pa
from fsspec.utils import get_protocol
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row

from tidegate.connectors.source import Source, SourceReader, SourceSplit
from tidegate.connectors.staged_parquet import (
    FILE_ROWS_MAX,
    MANIFEST_PATH,
    ROWS_PER_GROUP,
    FileLimits,
    ParquetSource,
    StagedFile,
    already_staged,
    write_files,
    write_manifest,
)
from tidegate.spark_bridge.dataframes.files_in_place import (
    FilesInPlace,
    NeedsSparkError,
    files_of,
    place_files,
    placed_files,
)
from tidegate.spark_bridge.dataframes.spark_types import arrow_schema_of, readable_schema
from tidegate.spark_bridge.errors import SparkBridgeError
from tidegate.spark_bridge.spark_calls import run_spark_action
from tidegate.spark_bridge.worker_python import other_python_advice, refuse_connect, refuse_unfit_workers
from tidegate.storage.errors import AlreadyExistsError, ConfigurationError, StorageError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import Store
from tidegate.storage.user_values import marked

log = logging.getLogger(__name__)
_PLAN_S = 300.0
"""Time limit for requesting the plan of a DataFrame, in seconds. Spark has already listed its files."""


class DataFrameSource:
    """A bounded DataFrame as a source. It can be read after `stage`.

    Raises ConfigurationError for a streaming DataFrame.
    """

    def __init__(self, df: DataFrame, stage: bool | None = None) -> None:
        """Creates the source. `stage` decides whether the rows are written to files.

        True: always. False: never (an error if Spark is needed). None: only if Spark is needed.
        """
        refuse_connect(df, "from_dataframe")
        if df.isStreaming:
            raise ConfigurationError("from_dataframe: a streaming DataFrame has no end; give a bounded one")
        self._df = df
        self._stage = stage
        self._schema = arrow_schema_of(readable_schema(df))

    @property
    def schema(self) -> pa.Schema:
        """Returns the columns of the DataFrame."""
        return self._schema

    def stage(self, url: str) -> Source:
        """Returns the source of the rows: the existing files, or files that Spark's executors write under `url`."""
        if self._stage:
            return stage_dataframe(self._df, url)
        try:
            return self._in_place(url)
        except NeedsSparkError as error:
            if self._stage is False:
                raise ConfigurationError(
                    f"from_dataframe(stage=False): only Spark can read this DataFrame: {error}; remove stage=False"
                ) from error
            log.info("the DataFrame is staged, because %s", error)
        return stage_dataframe(self._df, url)

    def reopen(self, url: str) -> Source:
        """Returns the source that an earlier job stored under `url`. Raises NotFoundError if there is none."""
        return placed_files(open_store(url)) or ParquetSource.open(url)

    def splits(self) -> Sequence[SourceSplit]:
        """Raises SparkBridgeError, because only the staged source has splits."""
        raise SparkBridgeError(
            "a DataFrame of Spark cannot be read by tasks before it is staged as Parquet files: use "
            "env.from_dataframe(df)"
        )

    def reader(self) -> SourceReader:
        """Raises SparkBridgeError, because only the staged source can be read."""
        raise SparkBridgeError(
            "a DataFrame of Spark cannot be read by tasks before it is staged as Parquet files: use "
            "env.from_dataframe(df)"
        )

    def _in_place(self, url: str) -> FilesInPlace:
        what = "asking for the plan of a DataFrame"
        try:
            plan = run_spark_action(self._df.sparkSession, lambda: files_of(self._df), timeout_s=_PLAN_S, what=what)
        except (PySparkException, Py4JError) as error:
            raise NeedsSparkError(f"the plan of the DataFrame cannot be read: {reason_of(error)}") from error
        source = place_files(plan, url)
        log.info("the DataFrame is read from its %d files, without staging", len(plan.files))
        return source


BatchFunction = Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]

_FILE_SCHEMA = pa.schema(
    [("path", pa.string()), ("rows", pa.int64()), ("size_bytes", pa.int64()), ("checksum", pa.string())]
)
# "pkg.SomeError: reason": the line of a Python or Java stack trace that names the cause.
_NAMES_CAUSE = re.compile(r"(Caused by: )?[\w.$]*(Error|Exception): ")
_NAME_OF_ERROR = re.compile(r"(?:(?:Caused by: )?[\w.$]*(?:Error|Exception): )?(?:\[[A-Z_.]+\] )?")
_OTHER_PYTHON = re.compile("No module named 'tidegate'|PYTHON_VERSION_MISMATCH|Python in worker has different version")
_FILE_SPARK_SCHEMA = "path string, rows long, size_bytes long, checksum string"


def stage_dataframe(
    df: DataFrame,
    url: str,
    *,
    rows_per_group: int = ROWS_PER_GROUP,
    files_max_rows: int = FILE_ROWS_MAX,
    timeout_s: float = 1800.0,
) -> ParquetSource:
    """Writes the rows of a bounded DataFrame to files under `url`, and returns them as a source.

    Each partition of `df` becomes files of up to `files_max_rows` rows, or none if it is empty. Each file is one split,
    so repartition `df` for more parallelism. Rows keep their order within a partition.

    Raises ConfigurationError for a streaming DataFrame or an unsupported column type, AlreadyExistsError if `url`
    already has staged data, SparkTimeoutError after `timeout_s` seconds, SparkLostError, and SparkBridgeError if Spark
    fails.
    """
    refuse_connect(df, "staging a DataFrame")
    if df.isStreaming:
        raise ConfigurationError("a streaming DataFrame has no end and cannot be staged; give a bounded one")
    if get_protocol(url) == "memory":
        raise ConfigurationError(
            f"cannot stage to {url}: Spark's executors are other processes and do not see this one's memory. "
            "Give a folder or a bucket."
        )
    if rows_per_group < 1 or files_max_rows < 1:
        raise ConfigurationError(
            f"rows_per_group ({rows_per_group}) and files_max_rows ({files_max_rows}) must be at least 1"
        )
    refuse_unfit_workers(df.sparkSession, "staging a DataFrame")
    schema = arrow_schema_of(readable_schema(df))
    store = open_store(url)
    if store.exists(MANIFEST_PATH):
        raise already_staged(store.url)
    folder = f"data-{uuid.uuid4().hex[:8]}"
    limits = FileLimits(rows_per_group=min(rows_per_group, files_max_rows), file_rows_max=files_max_rows)
    advice = "Nothing was staged; mend the cause and stage it again."
    files = stage_files(df, store, folder, schema, limits=limits, timeout_s=timeout_s, advice=advice)
    try:
        write_manifest(store, schema, files)
    except AlreadyExistsError:
        # Another process has staged here meanwhile. After any other error the manifest may exist all the same, and
        # then it needs its files.
        _delete_abandoned(store, folder)
        raise
    return ParquetSource(store.url, files, schema)


def stage_files(
    df: DataFrame,
    store: Store,
    folder: str,
    schema: pa.Schema,
    *,
    timeout_s: float,
    limits: FileLimits = FileLimits(),  # noqa: B008 (a frozen value)
    job_group: str | None = None,
    advice: str = "",
    marks: bool = False,
) -> tuple[StagedFile, ...]:
    """Writes the rows of a DataFrame as files in `folder`, in the order of its partitions. Does not write a manifest.

    `marks`: whether error texts mark the text that comes from Spark, because logs need it (`marked_reason`).

    After an error the files are deleted. Raises SparkTimeoutError, SparkLostError, SparkBridgeError with Spark's
    reason, or StorageError.
    """
    try:
        files = _write_from_executors(df, store, folder, schema, limits, timeout_s, job_group, advice, marks)
        _delete_leftovers(store, folder, files)
    except BaseException:
        _delete_abandoned(store, folder)
        raise
    return files


def _write_from_executors(
    df: DataFrame,
    store: Store,
    folder: str,
    schema: pa.Schema,
    limits: FileLimits,
    timeout_s: float,
    job_group: str | None,
    advice: str,
    marks: bool,
) -> tuple[StagedFile, ...]:
    what = f"staging a DataFrame to {store.url}"

    # Columns are known by their place: names may have dots, or differ in case only.
    numbered = df.toDF(*(f"c{place}" for place in range(len(schema))))

    def write() -> list[Row]:
        return numbered.mapInArrow(_partition_writer(store, folder, schema, limits), _FILE_SPARK_SCHEMA).collect()

    try:
        rows = run_spark_action(df.sparkSession, write, timeout_s=timeout_s, what=what, job_group=job_group)
    except (PySparkException, Py4JError) as error:
        reason = reason_of(error)
        if _OTHER_PYTHON.search(str(error)):
            raise SparkBridgeError(f"{what} failed in Spark: {reason}. {other_python_advice()}") from error
        shown = marked_reason(reason) if marks else reason
        raise SparkBridgeError(f"{what} failed in Spark: {shown}. {advice}".rstrip(". ")) from error
    return tuple(sorted((StagedFile(*row) for row in rows), key=lambda file: file.path))


def reason_of(error: Exception) -> str:
    """Returns the line of a Spark error that names the cause, without the stack traces of Python and the JVM.

    It is the last line that begins with the name of an error. If there is none, it is the first line, because hints
    follow the cause.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if _NAMES_CAUSE.match(line)]
    return (named[-1] if named else (lines or [type(error).__name__])[0]).rstrip(".")


def marked_reason(reason: str) -> str:
    """Returns an error text from Spark in which the part that may contain values of rows is marked.

    The name of the error is not marked.
    """
    name = _NAME_OF_ERROR.match(reason)
    end = 0 if name is None else name.end()
    return reason[:end] + marked(reason[end:])


def _partition_writer(store: Store, folder: str, schema: pa.Schema, limits: FileLimits) -> BatchFunction:
    """Returns the function that writes one partition. It runs in Spark's Python workers, once for each task attempt."""

    def write_partition(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None, "runs in a Spark task"
        # Padded, so that names sort by partition. The attempt makes them unique.
        name = f"{folder}/part-{task.partitionId():06d}-{task.taskAttemptId()}"
        for file in write_files(store, name, batches, schema, limits):
            yield pa.RecordBatch.from_pylist([asdict(file)], schema=_FILE_SCHEMA)

    return write_partition


def _delete_leftovers(store: Store, folder: str, files: tuple[StagedFile, ...]) -> None:
    """Deletes files of failed or repeated task attempts. If that fails, they only waste space."""
    wanted = {file.path for file in files}
    try:
        for name in store.list(folder):
            if f"{folder}/{name}" not in wanted:
                store.delete(f"{folder}/{name}")
    except StorageError as error:
        log.warning("could not delete leftovers of failed Spark tasks in %s: %s", folder, error)


def _delete_abandoned(store: Store, folder: str) -> None:
    """Deletes the files of a failed staging. An error here is only logged, so that the caller gets the first error."""
    try:
        store.delete_tree(folder)
    except StorageError as error:
        log.warning("could not delete the files of a failed staging in %s: %s", folder, error)
