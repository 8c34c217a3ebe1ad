"""`StreamSources` has the methods that create streams: from memory, files, Kafka, databases, Spark DataFrames, a rate,
and user-defined sources.

`StreamEnvironment` inherits these methods, and adds the methods that run the streams.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.api.program import Program, all_or_nothing
from tidegate.api.streams.changelog_mode import ChangelogMode
from tidegate.api.streams.expression_columns import known_schema
from tidegate.api.streams.other_names import ENVIRONMENTS, OtherNames
from tidegate.api.streams.state_meanings import meaning
from tidegate.api.streams.step import Step, StepOptions, checked_group
from tidegate.api.streams.stream import Stream
from tidegate.connectors.bad_rows import BAD_ROWS, BadRows, check_bad_rows
from tidegate.connectors.delta.source import DeltaSource
from tidegate.connectors.files.open_file import FileFormat
from tidegate.connectors.files.patterns import FilePattern
from tidegate.connectors.files.source import FileForm, FolderSource, source_of_files
from tidegate.connectors.formats.format import PayloadUse, ReadFormat
from tidegate.connectors.formats.named import PayloadFormat, check_registry, format_named
from tidegate.connectors.formats.raw import RawRead
from tidegate.connectors.formats.registry import SchemaRegistry
from tidegate.connectors.formats.row_versions import UNCHANGED, version_schema
from tidegate.connectors.hybrid_source import greatest, hybrid_source
from tidegate.connectors.iceberg.client import TablePlace
from tidegate.connectors.iceberg.options import CatalogLike, CatalogOptions
from tidegate.connectors.iceberg.source import Changes, IcebergFollower, IcebergSource
from tidegate.connectors.kafka.options import (
    ENDS,
    STARTS,
    End,
    OnMissing,
    Start,
    Topics,
    check_place,
    client_settings,
    kafka,
    with_group,
)
from tidegate.connectors.kafka.records import TIMESTAMP, RecordFormat
from tidegate.connectors.kafka.source import KafkaSource
from tidegate.connectors.memory_source import InMemory, MemorySource
from tidegate.connectors.postgres_cdc.client import connected, describe_table
from tidegate.connectors.postgres_cdc.options import TABLE, CdcTable, rows_column
from tidegate.connectors.postgres_cdc.source import PostgresCdcSource
from tidegate.connectors.postgres_cdc.text_values import row_schema
from tidegate.connectors.rate_source import RateSource
from tidegate.connectors.socket_source import SocketSource
from tidegate.connectors.source import (
    DeadLetterSource,
    DynamicSource,
    FilterableSource,
    LastingInputSource,
    ProjectableSource,
    Source,
)
from tidegate.operators.output_schema import PinnedSchema, SchemaMismatchError
from tidegate.operators.ranking.newest_rows import NewestRows, TableRows
from tidegate.operators.row_values import InexactValueError, check_exact, is_record, owned_row
from tidegate.operators.watermarks.watermark_generator import WatermarkAlignment
from tidegate.protocol.edges import OutputTag
from tidegate.storage.argument_checks import check_methods_run_at_once
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.row_schemas import SchemaLike, as_schema
from tidegate.storage.units import parse_duration_ms, parse_size_bytes
from tidegate.storage.user_values import unmarked

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import ray.data
    from pyspark.sql import DataFrame

FOLDER_SPLITS = 16
"""Default number of splits of a folder that is read with `discover`."""
ICEBERG_SPLITS = 8
"""Default number of splits of an Iceberg table that is read with `follow`."""
MAX_FILE_AGE = "7d"
"""Default of `max_file_age`: how long a source with `discover` remembers files, so that it can accept late files."""
LANES_A_SUBTASK = 2
"""Number of lanes for each subtask of a streaming DataFrame.

A lane is one split of the log of its rows. The number is fixed when the log is created.
"""
RANGES_A_SUBTASK = 4
"""Default number of ranges of a database query for each subtask.

With several ranges, one slow range delays the end only a little.
"""
IDLENESS = "1min"
"""Default of `idleness` for streaming DataFrames: a lane (split of the log) without rows for this time no longer holds
event time back.
"""
LOG_LIMIT = "1gb"
"""Default of `log_limit`: how many bytes of a streaming DataFrame's rows may be in the log without being covered by a
checkpoint.
"""


@all_or_nothing(lambda environment: environment._program)
class StreamSources(OtherNames):
    """Methods that create the streams of one program."""

    _other_names = ENVIRONMENTS

    def __init__(self, program: Program) -> None:
        self._program = program

    def from_batches(
        self,
        data: InMemory,
        *,
        splits: int | None = None,
        timestamp: str | pl.Expr | None = None,
        max_out_of_orderness: str | timedelta | int = 0,
        alignment: WatermarkAlignment | None = None,
        name: str = "from_batches",
        uid: str | None = None,
        parallelism: int | None = None,
        slot_sharing_group: str | None = None,
    ) -> Stream:
        """Creates a stream from data in memory: Arrow, polars or pandas.

        The data is sent with the job, so keep it small.

        One subtask reads the rows in their order. A restored job needs the same data and splits.

        - `data`: a table, a batch, a list of batches, or a DataFrame.
        - `splits`: cuts the data into this many parts, which are distributed over the subtasks and read side by side.
          Rows of different parts arrive in any order, also rows of one key.
        - `timestamp`, `max_out_of_orderness`, `alignment`: event time, as in `Stream.assign_timestamps`.
        - `name`, `uid`, `parallelism`, `slot_sharing_group`: see `Stream`.

        Raises ConfigurationError for data of another kind.

        Example:

            >>> env.from_batches(pa.table({"n": [1, 2]})).show()
            +---+
            | n |
            +---+
            | 1 |
            | 2 |
            +---+
        """
        source = MemorySource.of(without_pandas(data), 1 if splits is None else splits)
        stream = self.from_source(
            source, name=name, uid=uid, parallelism=parallelism, slot_sharing_group=slot_sharing_group
        )
        return timed(stream, timestamp, max_out_of_orderness, uid, alignment=alignment)

    def from_rows(
        self,
        rows: Iterable[Any],
        *,
        schema: SchemaLike | None = None,
        columns: Sequence[str] | None = None,
        splits: int | None = None,
        timestamp: str | pl.Expr | None = None,
        max_out_of_orderness: str | timedelta | int = 0,
        alignment: WatermarkAlignment | None = None,
        name: str = "from_rows",
        uid: str | None = None,
        parallelism: int | None = None,
        slot_sharing_group: str | None = None,
    ) -> Stream:
        """Creates a stream from rows that are Python objects.

        - `rows`: dicts, dataclass objects, named tuples, tuples (with `columns`), or strings and numbers, which become
          the column `value`.
        - `schema`: the columns and types: `{"k": str, "n": int}`, a dataclass, or a `pa.Schema`. By default they are
          inferred from the values.
        - `columns`: names for the values of tuples.
        - All other parameters: as in `from_batches`.

        Raises ConfigurationError for rows that have no common columns and types.

        Example:

            >>> env.from_rows([{"k": "a", "n": 1}, {"k": "b", "n": 2}]).columns
            ['k', 'n']
        """
        table = table_of_rows(rows, schema, columns)
        return self.from_batches(
            table,
            splits=splits,
            timestamp=timestamp,
            max_out_of_orderness=max_out_of_orderness,
            alignment=alignment,
            name=name,
            uid=uid,
            parallelism=parallelism,
            slot_sharing_group=slot_sharing_group,
        )

    def from_dataframe(
        self,
        df: DataFrame,
        *,
        timestamp: str | pl.Expr | None = None,
        max_out_of_orderness: str | timedelta | int = 0,
        idleness: str | timedelta | int | None = None,
        alignment: WatermarkAlignment | None = None,
        name: str = "from_dataframe",
        uid: str | None = None,
        parallelism: int | None = None,
        slot_sharing_group: str | None = None,
        spark_checkpoint: str | None = None,
        trigger: str | timedelta | int | None = None,
        log_limit: str | int | None = None,
        stage: bool | None = None,
    ) -> Stream:
        """Creates a stream from a Spark DataFrame, bounded or streaming.

        Bounded: when the job is executed, Spark's executors write the rows to files, once. The job reads these files,
        so after a failure it reads exactly the same rows again. A DataFrame that only reads Parquet files, with columns
        chosen and rows filtered, is read from these files, which must not change (`docs/sources.md`).

        Streaming (`spark.readStream...`): a Spark query runs in this driver, as long as the job. Each micro-batch is
        written exactly once to a log, which the job reads. The log is divided into lanes (its splits), and the slowest
        lane determines event time (`docs/streaming-dataframes.md`).

        - `df`: the DataFrame.
        - `stage`: for bounded DataFrames. True writes the rows to files in any case. False is an error if Spark is
          needed.
        - `idleness`: for streaming DataFrames. A lane without rows for this long, a minute by default, no longer holds
          event time back.
        - `trigger`: for streaming DataFrames, the interval of micro-batches (Spark's `processingTime`), by default
          none.
        - `log_limit`: for streaming DataFrames. The query waits while more bytes of rows, "1gb" by default, are not
          covered by a checkpoint.
        - `spark_checkpoint`: for streaming DataFrames, a folder for Spark's own checkpoint. It is needed if the job's
          checkpoints are in a bucket.
        - All other parameters: as in `from_batches`.

        Raises ConfigurationError for a setting that does not apply to this kind of DataFrame.

        Example:

            >>> flights = env.from_dataframe(env.spark.read.parquet("flights.parquet"))  # doctest: +SKIP
        """
        from tidegate.spark_bridge import DataFrameSource, StreamingDataFrameSource, StreamSettings

        source: Source
        if df.isStreaming:
            if stage is not None:
                raise ConfigurationError(
                    f"from_dataframe(stage={stage!r}): stage= is for bounded DataFrames, and this one is streaming; "
                    "remove stage="
                )
            lanes = LANES_A_SUBTASK * (parallelism if parallelism is not None else self._program.parallelism)
            trigger_ms = None if trigger is None else parse_duration_ms(trigger, setting="from_dataframe(trigger)")
            limit = LOG_LIMIT if log_limit is None else log_limit
            limit_bytes = parse_size_bytes(limit, setting="from_dataframe(log_limit)")
            source = StreamingDataFrameSource(df, lanes, StreamSettings(spark_checkpoint, trigger_ms, limit_bytes))
            idleness = IDLENESS if idleness is None else idleness
        else:
            _refuse_for_bounded(
                "from_dataframe",
                idleness=idleness,
                trigger=trigger,
                log_limit=log_limit,
                spark_checkpoint=spark_checkpoint,
            )
            source = DataFrameSource(df, stage)
        stream = self.from_source(
            source, name=name, uid=uid, parallelism=parallelism, slot_sharing_group=slot_sharing_group
        )
        return timed(stream, timestamp, max_out_of_orderness, uid, idleness, alignment)

    def from_ray_dataset(
        self,
        ds: ray.data.Dataset,
        *,
        schema: SchemaLike | None = None,
        timestamp: str | pl.Expr | None = None,
        max_out_of_orderness: str | timedelta | int = 0,
        alignment: WatermarkAlignment | None = None,
        name: str = "from_ray_dataset",
        uid: str | None = None,
        parallelism: int | None = None,
        slot_sharing_group: str | None = None,
    ) -> Stream:
        """Creates a stream from a `ray.data.Dataset`.

        When the job is executed, tasks of Ray Data compute the dataset and write its rows to files, once. The job reads
        these files, so after a failure, or in a restored job, it reads exactly the same rows again. Ray Data needs free
        CPUs to write them, in addition to the slots of the job. Each block is at least one file, which is one split,
        and rows keep their order within a block (`docs/sources.md`).

        - `ds`: the dataset. Columns of tensors or pickled objects, and blocks with different columns, are errors.
        - `schema`: its columns. Without it Ray Data may have to compute the first block.
        - All other parameters: as in `from_batches`.

        Raises ConfigurationError for columns that are not supported.

        Example:

            >>> numbers = env.from_ray_dataset(ray.data.range(1_000))  # doctest: +SKIP
        """
        from tidegate.connectors.ray_data import RayDatasetSource

        source = RayDatasetSource(ds, None if schema is None else as_schema(schema, "from_ray_dataset"))
        stream = self.from_source(
            source, name=name, uid=uid, parallelism=parallelism, slot_sharing_group=slot_sharing_group
        )
        return timed(stream, timestamp, max_out_of_orderness, uid, None, alignment)

    def from_files(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        format: FileFormat | None = None,
        schema: SchemaLike | None = None,
        columns: Sequence[str] | None = None,
        options: Mapping[str, object] | None = None,
        max_row_size: str | int = "4mb",
        partitions: SchemaLike | None = None,
        discover: str | timedelta | int | None = None,
        max_file_age: str | timedelta | int | None = None,
        splits: int | None = None,
        bad_rows: BadRows = "fail",
        timestamp: str | pl.Expr | None = None,
        max_out_of_orderness: str | timedelta | int = 0,
        idleness: str | timedelta | int | None = None,
        alignment: WatermarkAlignment | None = None,
        name: str = "from_files",
        uid: str | None = None,
        parallelism: int | None = None,
        slot_sharing_group: str | None = None,
    ) -> Stream:
        """Creates a stream from Parquet, Avro, CSV, JSON or text files.

        Without `discover` it is bounded: the files that exist when the job is submitted. With `discover` the stream
        continues, and reads each new file exactly once, also after restarts (`docs/sources.md`).

        - `files`: a path, a folder, a pattern such as "s3://bucket/in/**/*.csv.gz", or a list of these.
        - `format`: "parquet", "avro", "csv", "json" or "text". By default it is taken from the names.
        - `schema`: columns and types. By default they are taken from the first file.
        - `columns`: for Parquet, Avro and CSV, the columns to read.
        - `options`: options of Spark for CSV, JSON and text, by their names: `{"sep": ";"}`.
        - `max_row_size`: the most bytes of a row of text. In Parquet, a page may have 256 MB, or `max_row_size` if that
          is more, and so may a row whose values are repeated or compressed in the file.
        - `partitions`: columns and types in the names of folders, as Spark writes them (`day=2013-01-01/`). They are
          the last columns.
        - `bad_rows`: a row that cannot be read, or the rest of a damaged file, fails the job ("fail"), is skipped,
          counted and logged ("skip"), or goes to the stream `bad_rows()` of the result, with its place and the reason
          ("side").
        - `discover`: how often to look for new files, a duration. Files are then distributed over `splits` (16) by
          their names, and read in the order of their last change.
        - `max_file_age`: with `discover`, how long files are remembered, seen from the newest one; 7 days by default.
          Older files that appear later are skipped.
        - `idleness`: with `discover`, a split without files for this long, a minute by default, no longer holds event
          time back.
        - All other parameters: as in `from_batches`.

        Raises ConfigurationError for files that do not exist or have other columns.

        Example:

            >>> _ = open("numbers.csv", "w").write("n\\n1\\n2\\n")
            >>> env.from_files("numbers.csv", schema={"n": int}).columns
            ['n']
        """
        policy = check_bad_rows(bad_rows, "from_files")
        urls = _paths(files)
        size_max = parse_size_bytes(max_row_size, setting="from_files(max_row_size)")
        if not size_max:
            raise ConfigurationError("from_files(max_row_size=0): no row fits into that; give at least a few bytes")
        make: Callable[[FilePattern, FileForm, pa.Schema], Source] | None = None
        if discover is None:
            _refuse_for_bounded("from_files", idleness=idleness, max_file_age=max_file_age, splits=splits)
        else:
            every_ms = parse_duration_ms(discover, setting="from_files(discover)")
            age_ms = parse_duration_ms(max_file_age or MAX_FILE_AGE, setting="from_files(max_file_age)")
            lanes = FOLDER_SPLITS if splits is None else splits
            if every_ms < 1 or lanes < 1:
                raise ConfigurationError(
                    f"from_files(discover={discover!r}, splits={lanes}): "
                    "give a discover= above 0, and splits= of 1 or more"
                )
            make = partial(FolderSource, discover_ms=every_ms, age_ms=age_ms, lanes=lanes)
            idleness = idleness if idleness is not None or timestamp is None else IDLENESS
        columns_given = as_schema(schema, "from_files(schema=)")
        folders = as_schema(partitions, "from_files(partitions=)")
        source = source_of_files(urls, format, columns_given, columns, make, policy, folders, options, size_max)
        stream = self.from_source(
            source, name=name, uid=uid, parallelism=parallelism, slot_sharing_group=slot_sharing_group
        )
        return timed(stream, timestamp, max_out_of_orderness, uid, idleness, alignment)

    def from_delta(
        self,
        url: str | os.PathLike[str],
        *,
        version: int | None = None,
        timestamp: str | pl.Expr | None = None,
        max_out_of_orderness: str | timedelta | int = 0,
        alignment: WatermarkAlignment | None = None,
        name: str = "from_delta",
        uid: str | None = None,
        parallelism: int | None = None,
        slot_sharing_group: str | None = None,
    ) -> Stream:
        """Creates a stream from a Delta Lake table, which is read from its files without Spark.

        Needs `pip install 'tidegate[delta]'`.

        The stream is bounded. A restored job continues in the version that the first job has read.

        - `url`: the table.
        - `version`: the version to read; by default the newest one when the job is submitted.
        - All other parameters: as in `from_batches`.

        Raises ConfigurationError for tables with deletion vectors or column mapping (`docs/delta.md`).

        Example:

            >>> flights = env.from_delta("s3://bucket/flights", version=3)  # doctest: +SKIP
        """
        source = DeltaSource.open(os.fspath(url), version)
        stream = self.from_source(
            source, name=name, uid=uid, parallelism=parallelism, slot_sharing_group=slot_sharing_group
        )
        return timed(stream, timestamp, max_out_of_orderness, uid, alignment=alignment)

    def from_iceberg(
        self,
        *,
        catalog: CatalogLike,
        table: str,
        snapshot_id: int | None = None,
        follow: str | timedelta | int | None = None,
        start: str | int | None = None,
        changes: Changes | None = None,
        splits: int | None = None,
        timestamp: str | pl.Expr | None = None,
        max_out_of_orderness: str | timedelta | int = 0,
        idleness: str | timedelta | int | None = None,
        alignment: WatermarkAlignment | None = None,
        name: str = "from_iceberg",
        uid: str | None = None,
        parallelism: int | None = None,
        slot_sharing_group: str | None = None,
    ) -> Stream:
        """Creates a stream from an Apache Iceberg table. Needs `pip install 'tidegate[iceberg]'`.

        Without `follow` it is bounded: the rows of one snapshot. A restored job continues in the snapshot that the
        first job has read.

        - `catalog`: the name of a catalog in pyiceberg's configuration, its properties, or an object of pyiceberg.
        - `table`: namespace and name, "shop.orders".
        - `snapshot_id`: the snapshot to read; by default the current one when the job is submitted.
        - `follow`: how often to look for new snapshots, a duration. The stream does not end then.
        - `start`: with `follow`, "all" (the default) begins with the rows of the current snapshot, "new" with the next
          snapshot, and the id of a snapshot with the snapshot after that.
        - `changes`: with `follow`, a snapshot that replaces or deletes rows fails the job ("fail", the default), or is
          skipped with a warning ("skip").
        - `splits`: with `follow`, into how many splits (8) the files are divided.
        - All other parameters: as in `from_files`.

        Raises ConfigurationError if the table or the snapshot does not exist (`docs/iceberg.md`).

        Example:

            >>> orders = env.from_iceberg(catalog="lake", table="shop.orders", follow="10s")  # doctest: +SKIP
        """
        place = TablePlace(CatalogOptions.of(catalog, "from_iceberg"), table)
        source: Source
        if follow is None:
            _refuse_for_bounded("from_iceberg", start=start, changes=changes, splits=splits, idleness=idleness)
            source = IcebergSource.open(place, snapshot_id)
        else:
            every_ms = parse_duration_ms(follow, setting="from_iceberg(follow)")
            lanes = ICEBERG_SPLITS if splits is None else splits
            if every_ms < 1 or lanes < 1:
                raise ConfigurationError(
                    f"from_iceberg(follow={follow!r}, splits={lanes}): give a follow= above 0, and splits= of 1 or more"
                )
            if snapshot_id is not None:
                raise ConfigurationError("from_iceberg: with follow= give start= in place of snapshot_id=")
            if changes not in (None, "fail", "skip"):
                raise ConfigurationError(f"from_iceberg(changes={changes!r}): give 'fail' or 'skip'")
            source = IcebergFollower.open(place, start or "all", every_ms, lanes, changes or "fail")
            idleness = idleness if idleness is not None or timestamp is None else IDLENESS
        stream = self.from_source(
            source, name=name, uid=uid, parallelism=parallelism, slot_sharing_group=slot_sharing_group
        )
        return timed(stream, timestamp, max_out_of_orderness, uid, idleness, alignment)

    def from_kafka(
        self,
        servers: str,
        *,
        topics: Sequence[str] | re.Pattern[str],
        value: SchemaLike | Literal["bytes", "string"] = "bytes",
        key: SchemaLike | Literal["bytes", "string"] | None = None,
        format: PayloadFormat = "json",
        key_format: PayloadFormat | None = None,
        registry: SchemaRegistry | str | None = None,
        keys: Sequence[str] = (),
        metadata: Sequence[str] = (),
        start: Start = "earliest",
        end: End | None = None,
        discover: str | timedelta | int | None = None,
        group: str | None = None,
        commit_offsets: bool = False,
        properties: Mapping[str, object] | None = None,
        bad_rows: BadRows = "fail",
        on_missing: OnMissing = "fail",
        timestamp: str | pl.Expr | None = None,
        max_out_of_orderness: str | timedelta | int = 0,
        idleness: str | timedelta | int | None = None,
        alignment: WatermarkAlignment | None = None,
        name: str = "from_kafka",
        uid: str | None = None,
        parallelism: int | None = None,
        slot_sharing_group: str | None = None,
    ) -> Stream:
        """Creates a stream from the records of Kafka topics. Needs `pip install 'tidegate[kafka]'`.

        - `servers`: the brokers, "host:port,host:port".
        - `properties`: settings of librdkafka.
        - `topics`: a list of names, or `re.compile(...)` for all topics with a name that matches as a whole.
        - `value`: "bytes" or "string": the columns are Spark's, key, value, topic, partition, offset and timestamp. Or
          a schema, the columns of the values. A format with a schema of its own needs none.
        - `key`: "bytes", "string" or a schema adds the column `kafka_key`, a struct for a schema.
        - `format`: of the values, with a schema: "json", "csv", "text" or "raw". "avro", "json_schema" and "protobuf"
          have a schema of their own, in a registry or in an object such as `tg.AvroFormat(...)` (`docs/formats.md`). Or
          a format of change data, of which the result is a stream of changes of a table (`docs/change-data.md`):
          "debezium" (or a `tg.DebeziumFormat`) for events of Debezium, or "upsert" for the newest row of each key, with
          tombstones for deleted rows.
        - `key_format`: of the keys, as `format`.
        - `registry`: for "avro", "json_schema" and "protobuf", and for "debezium" in Avro: the address of the schema
          registry, or a `tg.SchemaRegistry`.
        - `keys`: for change data, the columns of the table's primary key.
        - `metadata`: adds columns: "topic", "partition", "offset", "timestamp", "headers" and "tombstone" (whether a
          record has no value). With a schema they are called `kafka_topic` and so on.
        - `start`: "earliest", "latest", a time (a datetime with a time zone, or milliseconds since 1970), "group" (the
          committed offsets of `group`; "group_or_earliest" or "group_or_latest" for partitions without one), or such a
          place for each topic or partition. There, an integer is an offset: `{"bids": {0: 17, 1: "latest"}}`.
        - `end`: "latest" ends the stream after the records that exist at submission. Or a time, at most now, or offsets
          as for `start`: the stream ends before that record.
        - `discover`: how often to look for new partitions, and new topics that match, a duration; by default never.
        - `group`: the consumer group.
        - `commit_offsets`: whether to commit offsets to `group` after each completed checkpoint, so that tools show the
          lag. The job itself never reads them.
        - `bad_rows`: a record that cannot be read fails the job ("fail"), is skipped with a warning ("skip"), or goes
          to `bad_rows()` of the result ("side").
        - `on_missing`: if the next record of a checkpoint no longer exists, the job fails ("fail"), or continues at the
          beginning ("earliest") or the end ("latest") of the partition, with a warning.
        - `timestamp`: a column, or "kafka" for the timestamps of the records.
        - `idleness`: a partition without records for this long no longer holds event time back; by default it always
          does.
        - All other parameters: as in `from_batches`.

        Raises ConfigurationError for wrong settings.

        Example:

            >>> bids = env.from_kafka("broker:9092", topics=["bids"], value={"price": int})  # doctest: +SKIP
        """
        policy = check_bad_rows(bad_rows, "from_kafka")
        if on_missing not in ("fail", "earliest", "latest"):
            raise ConfigurationError(f"from_kafka(on_missing={on_missing!r}): give 'fail', 'earliest' or 'latest'")
        named = Topics.of(topics)
        if end is not None and discover is not None:
            raise ConfigurationError(
                "from_kafka: a bounded source does not look for new partitions; remove end= or discover="
            )
        check_place(start, STARTS, "start")
        if end is not None:
            check_place(end, ENDS, "end")
        kafka()
        by_record = isinstance(timestamp, str) and timestamp == "kafka"
        form = record_format(named.names, value, key, format, key_format, registry, keys, metadata, by_record)
        changes = form.value if form.value.has_changes else None
        if changes is not None:
            check_changes(changes, named.names, timestamp, discover)
        every_ms = None if discover is None else parse_duration_ms(discover, setting="from_kafka(discover)")
        given = with_group(properties or {}, group, start, commit_offsets)
        client_settings(servers, given)
        source = KafkaSource(
            servers,
            named,
            form,
            start,
            end,
            every_ms,
            tuple(given.items()),
            policy,
            on_missing,
            commit_offsets,
        )
        own = () if changes is None else (UNCHANGED,)
        stream = self._begun(source, name, uid, parallelism, slot_sharing_group, own)
        if changes is not None:
            subtasks = 1 if changes.needs_one_partition else parallelism
            options = StepOptions(f"{name}: changes", None if uid is None else f"{uid}-changes", subtasks)
            return change_stream(stream, keys, options, _UNCHANGED_ADVICE)
        column = timestamp if not by_record else "timestamp" if form.plain else TIMESTAMP
        return timed(stream, column, max_out_of_orderness, uid, idleness, alignment)

    def from_sql(
        self,
        address: str,
        query: str,
        *,
        partition_by: str | None = None,
        partitions: int | None = None,
        schema: SchemaLike | None = None,
        timestamp: str | pl.Expr | None = None,
        max_out_of_orderness: str | timedelta | int = 0,
        alignment: WatermarkAlignment | None = None,
        name: str = "from_sql",
        uid: str | None = None,
        parallelism: int | None = None,
        slot_sharing_group: str | None = None,
    ) -> Stream:
        """Creates a bounded stream from the rows of a database query.

        With `partition_by` all subtasks read the query, in ranges of a column. If a range is read again after a failure
        and its rows have changed, the job fails. Needs `pip install 'tidegate[databases]'`; see `docs/databases.md`.

        - `address`: for PostgreSQL an address of libpq, such as "postgresql://user@host/database", else a URL of
          SQLAlchemy, such as "sqlite:////folder/file.db".
        - `query`: a SELECT without parameters. Its rows must not change while the job runs.
        - `partition_by`: a column of integers, dates or timestamps without NULL, best one with an index.
        - `partitions`: the number of ranges; by default four for each subtask.
        - `schema`: the columns and types. PostgreSQL needs it only for columns of numeric without a precision.
        - All other parameters: as in `from_batches`.

        Raises ConfigurationError for a query that fails or has columns of other types, and for NULL in `partition_by`.

        Example:

            >>> import sqlite3
            >>> shop = sqlite3.connect("shop.db")
            >>> _ = shop.executescript("CREATE TABLE sales (id INTEGER); INSERT INTO sales VALUES (7)")
            >>> env.from_sql("sqlite:///shop.db", "SELECT id FROM sales", schema={"id": int}).show()
            +----+
            | id |
            +----+
            |  7 |
            +----+
        """
        from tidegate.connectors.sql.source import sql_source

        if not isinstance(address, str):
            raise ConfigurationError(f"from_sql(address={address!r}): give the address of a database, a string")
        if partitions is not None and partition_by is None:
            raise ConfigurationError(
                f"from_sql(partitions={partitions!r}) needs a column to divide the rows by; give partition_by="
            )
        if partitions is not None and (type(partitions) is not int or partitions < 1):
            raise ConfigurationError(f"from_sql(partitions={partitions!r}): give a whole number from 1 on")
        subtasks = parallelism if parallelism is not None else self._program.parallelism
        count = RANGES_A_SUBTASK * subtasks if partitions is None else partitions
        given = pa.schema([]) if schema is None else as_schema(schema, "from_sql")
        stream = self.from_source(
            sql_source(address, query, given, partition_by, count),
            name=name,
            uid=uid,
            parallelism=parallelism,
            slot_sharing_group=slot_sharing_group,
        )
        return timed(stream, timestamp, max_out_of_orderness, uid, alignment=alignment)

    def from_postgres_cdc(
        self,
        dsn: str,
        *,
        tables: Sequence[str],
        slot: str,
        publication: str | None = None,
        warn_bytes: str | int = "1gb",
        name: str = "from_postgres_cdc",
        uid: str | None = None,
        slot_sharing_group: str | None = None,
    ) -> dict[str, Stream]:
        """Creates streams of the changes of PostgreSQL tables, read from the server's log.

        Needs `pip install 'tidegate[postgres]'`.

        The existing rows are read first, then each change, exactly once (`docs/change-data.md`). The results are
        streams of changes, with the primary keys of the tables as their keys.

        - `dsn`: the database, "postgresql://user@host/database". The user needs REPLICATION, and may read the tables.
        - `tables`: a list of names, such as "public.orders". The result is a dict with a stream for each name.
        - `slot`: the name of the replication slot, which the job creates. It must be new when a job begins without a
          checkpoint.
        - `publication`: the publication of the tables, which is created if there is none; by default named as the slot.
        - `warn_bytes`: a size. When the server keeps more of its log for the slot, a warning names the bytes.
        - `name`, `uid`, `slot_sharing_group`: see `Stream`.

        Raises ConfigurationError for tables that cannot be followed, and if the database does not answer.

        Example:

            >>> found = env.from_postgres_cdc(dsn, tables=["public.orders"], slot="orders")  # doctest: +SKIP
            >>> orders = found["public.orders"]  # doctest: +SKIP
        """
        names = [] if isinstance(tables, str) else list(tables)
        if not names or len(set(names)) < len(names) or not all(isinstance(each, str) for each in names):
            raise ConfigurationError(f"from_postgres_cdc(tables={tables!r}): give a list of different names")
        if not isinstance(slot, str) or not re.fullmatch("[a-z0-9_]{1,63}", slot):
            raise ConfigurationError(
                f"from_postgres_cdc(slot={slot!r}): give up to 63 lower-case letters, digits and underscores"
            )
        limit_bytes = parse_size_bytes(warn_bytes, setting="from_postgres_cdc(warn_bytes)")
        with connected(dsn) as connection:
            found = tuple(describe_table(connection, each) for each in names)
        same = next((each for each in found if sum(other.oid == each.oid for other in found) > 1), None)
        if same is not None:
            raise ConfigurationError(f"from_postgres_cdc(tables={names}): {same.text} is there twice; name it once")
        source = PostgresCdcSource(dsn, found, slot, publication or slot, limit_bytes)
        stream = self._begun(source, name, uid, 1, slot_sharing_group, source.schema.names)
        streams = {}
        for number, (given, table) in enumerate(zip(names, found, strict=True)):
            part = None if uid is None else f"{uid}-{table.text}"
            streams[given] = table_changes(stream, number, table, StepOptions(f"{name}: {table.text}", part, 1))
        return streams

    def from_rate(
        self,
        rows_per_second: float | None,
        *,
        rows: int | None = None,
        splits: int | None = None,
        timestamp: str | pl.Expr | None = None,
        max_out_of_orderness: str | timedelta | int = 0,
        alignment: WatermarkAlignment | None = None,
        name: str = "from_rate",
        uid: str | None = None,
        parallelism: int | None = None,
        slot_sharing_group: str | None = None,
    ) -> Stream:
        """Creates a stream of numbered rows at a constant rate, for demos and benchmarks (Spark's `rate`, Flink's
        `datagen`).

        The columns are `timestamp`, the time at which the row was due, and `value`, its number. Rows are never early or
        skipped. Rows that are overdue after a restore arrive at once. A restored job needs the same rate, rows and
        splits.

        - `rows_per_second`: the rate; None for as fast as possible, with timestamps 1 ms apart.
        - `rows`: the number of rows; by default the stream does not end.
        - `splits`: by default one subtask reads rows in the order of their numbers. With n splits every n-th row is in
          the same split, and splits are read side by side.
        - All other parameters: as in `from_batches`.

        Raises ConfigurationError for values out of range.

        Example:

            >>> env.from_rate(None, rows=3).select("value").show()
            +-------+
            | value |
            +-------+
            |     0 |
            |     1 |
            |     2 |
            +-------+
        """
        source = RateSource(rows_per_second, rows, 1 if splits is None else splits)
        stream = self.from_source(
            source, name=name, uid=uid, parallelism=parallelism, slot_sharing_group=slot_sharing_group
        )
        return timed(stream, timestamp, max_out_of_orderness, uid, alignment=alignment)

    def from_socket(
        self,
        host: str,
        port: int,
        *,
        lossy: bool = False,
        bad_rows: BadRows = "fail",
        name: str = "from_socket",
        uid: str | None = None,
        slot_sharing_group: str | None = None,
    ) -> Stream:
        """Creates a stream of the lines that a server such as `nc -lk 9999` sends, in the column `value`. For demos.

        After a failure the source connects again. Lines that were read and are not in a checkpoint are lost. The stream
        ends when the server closes the connection.

        - `host`, `port`: where the server listens.
        - `lossy`: must be True, which accepts that lines may be lost.
        - `bad_rows`: for lines that are not UTF-8, or longer than a mebibyte: "fail", "skip" or "side", as in
          `from_files`.
        - `name`, `uid`, `slot_sharing_group`: see `Stream`.

        Raises ConfigurationError unless `lossy` is True.

        Example:

            >>> lines = env.from_socket("localhost", 9999, lossy=True)
            >>> lines.columns
            ['value']
        """
        policy = check_bad_rows(bad_rows, "from_socket")
        if not lossy:
            raise ConfigurationError(
                "from_socket: a socket cannot be read twice, so lines are lost whenever the job restarts, even with "
                "checkpoints; accept that with lossy=True, or put Kafka or files in between"
            )
        return self.from_source(
            SocketSource(host, port, policy), name=name, uid=uid, parallelism=1, slot_sharing_group=slot_sharing_group
        )

    def hybrid(
        self,
        first: Stream,
        *,
        then: Stream | Callable[[Any], Stream],
        position: str | None = None,
        position_by: str | None = None,
        timestamp: str | pl.Expr | None = None,
        max_out_of_orderness: str | timedelta | int = 0,
        idleness: str | timedelta | int | None = None,
        alignment: WatermarkAlignment | None = None,
        name: str = "hybrid",
        uid: str | None = None,
        parallelism: int | None = None,
        slot_sharing_group: str | None = None,
    ) -> Stream:
        """Creates a stream that reads a bounded source first, and then an unbounded source: backfill, then follow
        (Flink's `HybridSource`).

        The second source is read when all rows of the first one were processed, by all subtasks. Each row counts once,
        also if the job is killed at the switch (`docs/hybrid.md`). The position where the second source begins is
        fixed when the job is submitted: give `start=` of `from_kafka`, or compute it with `position`.

        - `first`: a stream straight from a bounded source: `from_files`, `from_delta`, `from_dataframe` and others.
        - `then`: a stream straight from a source that continues, such as `from_kafka`, with the same columns. With
          `position`, a function that returns this stream, given the position.
        - `position`: a column of the first source, of integers, times or dates. `then` is called with its greatest
          value, or None without a value. The column is read for it, in this process, before the call returns.
        - `position_by`: a second column of the first source. `then` is called with a dict of the greatest value for
          each of its values, such as the last offset of each partition.
        - `timestamp`, `max_out_of_orderness`, `idleness`, `alignment`: event time of both, as in
          `Stream.assign_timestamps`. Do not give them to the two sources.
        - `name`, `uid`, `parallelism`, `slot_sharing_group`: see `Stream`. The uid of the two sources is not used.

        Raises ConfigurationError if the first source has no end, the second one is bounded, or the columns differ.

        Example:

            >>> live = env.from_rate(None, rows=2)
            >>> past = env.from_rows([{"timestamp": None, "value": 7}], schema=live.schema)
            >>> env.hybrid(past, then=live).columns
            ['timestamp', 'value']
            >>> past = env.from_rows([{"timestamp": None, "value": 7}], schema=past.schema)
            >>> env.hybrid(past, then=lambda last: env.from_rate(None, rows=last), position="value").columns
            ['timestamp', 'value']
        """
        known = None
        if position is not None:
            if isinstance(then, Stream) or not callable(then):
                raise ConfigurationError(
                    "hybrid(position=) needs a function as then=, such as then=lambda last: env.from_kafka(..., "
                    "start=last)"
                )
            before = source_node(self._program, first, "hybrid(first=)").source
            assert before is not None
            known = greatest(before, position, position_by)
            then = then(known.value)
        elif position_by is not None:
            raise ConfigurationError("hybrid(position_by=) is for position=; give both, or remove it")
        elif not isinstance(then, Stream) and callable(then):
            raise ConfigurationError(
                "hybrid(then=) is a function, which needs position=, a column of the first source; give the column, or "
                "a stream"
            )
        given = (("first", first), ("then", then))
        nodes = [source_node(self._program, stream, f"hybrid({which}=)") for which, stream in given]
        if nodes[0] is nodes[1]:
            raise ConfigurationError("hybrid: first= and then= are one stream; call from_... for each")
        widths = {node.parallelism for node in nodes}
        groups = {node.slot_group for node in nodes}
        if parallelism is None and len(widths) > 1:
            raise ConfigurationError(f"hybrid: the sources have parallelism {sorted(widths)}; give parallelism= here")
        if slot_sharing_group is None and len(groups) > 1:
            raise ConfigurationError("hybrid: the sources have two slot sharing groups; give slot_sharing_group= here")
        first_source, second_source = (node.source for node in nodes)
        assert first_source is not None
        assert second_source is not None
        source = hybrid_source(first_source, second_source, None if known is None else known.splits)
        self._program.nodes[:] = [node for node in self._program.nodes if node not in nodes]
        stream = self.from_source(
            source,
            name=name,
            uid=uid,
            parallelism=widths.pop() if parallelism is None else parallelism,
            slot_sharing_group=groups.pop() if slot_sharing_group is None else slot_sharing_group,
        )
        return timed(stream, timestamp, max_out_of_orderness, uid, idleness, alignment)

    def from_source(
        self,
        source: Source,
        *,
        name: str = "source",
        uid: str | None = None,
        parallelism: int | None = None,
        slot_sharing_group: str | None = None,
    ) -> Stream:
        """Creates a stream from a user-defined source (`docs/sources.md`).

        - `source`: an object like `tg.Source`, with `schema`, `splits` and `reader`.
        - `name`, `uid`, `parallelism`, `slot_sharing_group`: see `Stream`.

        Raises ConfigurationError for an object that lacks one of these.

        Example:

            >>> events = env.from_source(MySource())  # doctest: +SKIP
        """
        lacks = [name for name in ("schema", "splits", "reader") if not hasattr(source, name)]
        if lacks or isinstance(source, type):
            what = f"has no {', '.join(lacks)}" if lacks else "is a class; give an object"
            raise ConfigurationError(f"from_source takes an object like tg.Source; {source!r} {what}")
        check_methods_run_at_once(
            source,
            Source,
            DynamicSource,
            LastingInputSource,
            ProjectableSource,
            FilterableSource,
            may_yield=("splits",),
        )
        return self._begun(source, name, uid, parallelism, slot_sharing_group)

    def _begun(
        self,
        source: Source,
        name: str,
        uid: str | None,
        parallelism: int | None,
        slot_sharing_group: str | None,
        own: Sequence[str] = (),
    ) -> Stream:
        """Adds a source to the program and returns its stream.

        `own` names the columns with reserved names that tidegate itself adds.
        """
        if self._program.given_up:
            self._program.clear()
        node = StreamNode(
            uid=self._program.new_uid(name, uid),
            name=name,
            parallelism=parallelism if parallelism is not None else self._program.parallelism,
            schema=source.schema,
            source=source,
            slot_group=checked_group(name, slot_sharing_group),
            side_outputs=_bad_rows(source),
        )
        self._program.add_node(node, own)
        return Stream(self._program, ((node, None),))


def source_node(program: Program, stream: object, what: str) -> StreamNode:
    """Returns the source of a stream, to which no step has been added.

    Raises ConfigurationError for other streams. `what` names the argument in the error.
    """
    if not isinstance(stream, Stream):
        raise ConfigurationError(f"{what}: give a stream, such as env.from_files(...), not {type(stream).__name__}")
    node, partitioning = stream._inputs[0]
    if len(stream._inputs) > 1 or partitioning is not None or node.source is None:
        raise ConfigurationError(
            f"{what}: give the stream that a source returns, such as env.from_files(...), before any other step. Give "
            "timestamp= and the steps that follow to the result of hybrid"
        )
    if stream._changelog is not None:
        raise stream._changelog.refuse("hybrid")
    if node not in program.nodes:
        raise ConfigurationError(
            f"{what}: the stream was used by another hybrid, or belongs to an earlier program; call from_... again"
        )
    if any(upstream.maker is node for each in program.nodes for upstream, _ in each.inputs):
        raise ConfigurationError(f"{what}: another step reads {node.name!r} (uid {node.uid!r}); call from_... again")
    return node


_UNCHANGED_ADVICE = "Set REPLICA IDENTITY FULL for the table, or read the topic from its begin (start='earliest')"


def change_stream(stream: Stream, keys: Sequence[str], options: StepOptions, advice: str) -> Stream:
    """Returns the stream of changes that row versions make. `stream` has the columns of `version_schema`.

    `advice` is the end of the error about an unchanged value whose row is not stored: what the user can do. Raises
    ConfigurationError for keys that are not columns.
    """
    names = tuple(keys)
    schema = known_schema(stream, options.name)
    operator = partial(NewestRows, names, schema, advice)
    output = operator().output
    means = meaning("newest rows", {"keys": names}, rows={"": (output, names)})
    step = Step(operator=operator, schema=output, options=options, meaning=means)
    rows = stream._by_keys(names)._then(step)
    changelog = ChangelogMode.of(rows._inputs[0][0], names, changes=True)
    return rows._derived(keyed_by=names, changelog=changelog)


def table_changes(stream: Stream, number: int, table: CdcTable, options: StepOptions) -> Stream:
    """Returns the stream of changes of one table.

    `stream` has the rows of several tables (see `source_schema`), and `number` is the number of the table.
    """
    schema = version_schema(row_schema(table))
    operator = partial(TableRows, number, TABLE, rows_column(number), schema)
    part = options.part("rows", stream._inputs[0][0].parallelism)
    rows = stream._then(Step(operator=operator, schema=schema, options=part, own=(UNCHANGED,)))
    advice = f"Run ALTER TABLE {table.text} REPLICA IDENTITY FULL, and submit the job without a checkpoint"
    return change_stream(rows, table.keys, options, advice)


def record_format(
    topics: Sequence[str],
    value: SchemaLike | str,
    key: SchemaLike | str | None,
    format: PayloadFormat,
    key_format: PayloadFormat | None,
    registry: SchemaRegistry | str | None,
    keys: Sequence[str],
    metadata: Sequence[str],
    by_record: bool,
) -> RecordFormat:
    """Returns the format of records, from the arguments of `from_kafka`. Raises ConfigurationError for arguments that
    contradict each other.

    `by_record` is True if rows need the timestamps of records.
    """
    for setting, given in (("keys", keys), ("metadata", metadata)):
        if isinstance(given, str):
            raise ConfigurationError(f"from_kafka({setting}={given!r}): give a list of names, as in {[given]}")
    by_name = isinstance(value, str) or value is None
    if by_name and value not in ("bytes", "string"):
        raise ConfigurationError(
            f"from_kafka(value={value!r}): give a schema, for JSON objects, or 'bytes' or 'string'"
        )
    columns = None if by_name else as_schema(value, "from_kafka(value=)")
    plain = by_name and format == "json"
    if value == "string" and not plain:
        raise ConfigurationError(f"from_kafka(value='string') does not apply to format={format!r}; remove it")
    check_registry(registry, "from_kafka", format, key_format)
    read: ReadFormat
    if plain:
        read = RawRead("value", text=value == "string")
    else:
        found = format_named(format, registry, "from_kafka")
        read = found.for_reading(columns, PayloadUse("from_kafka", tuple(topics), keys=tuple(keys)))
    if keys and not read.has_changes:
        raise ConfigurationError("from_kafka(keys=) is for format='debezium' and 'upsert'; remove it")
    timed_by = ("timestamp",) if by_record and not plain else ()
    key_read = _key_format(topics, key, key_format, registry)
    if plain and key_read is None:
        key_read = RawRead("key", part="key")
    return RecordFormat(read, key_read, tuple(dict.fromkeys((*timed_by, *metadata))), plain)


def _key_format(
    topics: Sequence[str],
    key: SchemaLike | str | None,
    key_format: PayloadFormat | None,
    registry: SchemaRegistry | str | None,
) -> ReadFormat | None:
    if isinstance(key, str):
        if key not in ("bytes", "string"):
            raise ConfigurationError(f"from_kafka(key={key!r}): give 'bytes' or 'string', or a schema and key_format=")
        if key_format is not None:
            raise ConfigurationError(f"from_kafka(key={key!r}) has no key_format=; give a schema, or remove key=")
        return RawRead("key", text=key == "string", part="key")
    if key is None and key_format is None:
        return None
    columns = None if key is None else as_schema(key, "from_kafka(key=)")
    named = format_named("json" if key_format is None else key_format, registry, "from_kafka", "key_format")
    return named.for_reading(columns, PayloadUse("from_kafka", tuple(topics), "key"))


def check_changes(form: ReadFormat, topics: Sequence[str], timestamp: object, discover: object) -> None:
    """Raises ConfigurationError for arguments of `from_kafka` that do not apply to change data."""
    if len(topics) != 1:
        raise ConfigurationError(
            f"from_kafka: a topic of change data is a table. Call from_kafka for each topic, not {list(topics)}"
        )
    if timestamp is not None:
        raise ConfigurationError(
            "from_kafka: a stream of changes has no event time, because no step of event time takes changes; remove "
            "timestamp="
        )
    if form.needs_one_partition and discover is not None:
        raise ConfigurationError(
            "from_kafka(format=DebeziumFormat(truncates='apply')): the topic must have one partition; remove discover="
        )


def _paths(files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> str | list[str]:
    """Returns the argument `files` of `from_files` as one path, or a list of paths. Raises ConfigurationError for other
    values.
    """
    if isinstance(files, str | os.PathLike):
        return os.fspath(files)
    if isinstance(files, Sequence) and files and all(isinstance(each, str | os.PathLike) for each in files):
        return [os.fspath(each) for each in files]
    raise ConfigurationError(
        f"from_files({files!r}): give a path or a pattern, such as '/in/*.parquet', or a list of them"
    )


def _bad_rows(source: Source) -> tuple[OutputTag, ...]:
    """Returns the tag of the side output for rows that a source cannot read.

    Empty if the source has no such side output.
    """
    schema = source.bad_rows_schema if isinstance(source, DeadLetterSource) else None
    return () if schema is None else (OutputTag(BAD_ROWS, schema),)


_UNBOUNDED = {
    "from_dataframe": "streaming DataFrames, and this one is bounded",
    "from_iceberg": "a table that is followed, and without follow= one snapshot is read",
    "from_files": "a growing folder, and without discover= the folder is bounded",
}


def _refuse_for_bounded(method: str, **settings: object) -> None:
    """Raises ConfigurationError if settings were given that apply only to unbounded input."""
    given = [name for name, value in settings.items() if value is not None]
    if given:
        raise ConfigurationError(
            f"{method}: {', '.join(settings)} are for {_UNBOUNDED[method]}: remove {' and '.join(given)}"
        )


VALUE = "value"
"""Name of the column for rows that are single values, as in Spark's text source."""
_SINGLE = (str, bytes, int, float, bool)


def table_of_rows(rows: Iterable[Any], schema: SchemaLike | None, columns: Sequence[str] | None) -> pa.Table:
    """Converts rows to an Arrow table.

    `rows` are dicts, dataclass objects or named tuples; or tuples, with the column names `columns` or the names of
    `schema`; or single strings and numbers, which become the column "value". Without `schema` the types are inferred
    from the values, and a column that a row lacks is null in this row.

    Raises ConfigurationError for rows that do not fit, and for an empty list without `schema`.
    """
    given = as_schema(schema, "from_rows(schema=)")
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise ConfigurationError(f"from_rows takes a list of rows, not {type(rows).__name__}; put it into a list")
    if columns is not None and isinstance(columns, str):
        raise ConfigurationError(f"from_rows(columns={columns!r}): give a list of names")
    names = list(columns) if columns is not None else None if given is None else given.names
    if given is not None and columns is not None and list(columns) != given.names:
        raise ConfigurationError(
            f"from_rows: columns={list(columns)} and schema= differ, which has {given.names}; remove columns="
        )
    made = [_row(number, row, names) for number, row in enumerate(rows)]
    if not made:
        if given is None:
            raise ConfigurationError(
                "from_rows([]): without rows give the columns, such as schema={'k': str, 'n': int}"
            )
        return given.empty_table()
    try:
        batch = PinnedSchema(given).from_rows(made)
    except SchemaMismatchError as error:
        where = "from_rows" if error.row is None else f"from_rows: row {error.row}"
        raise ConfigurationError(f"{where}: {unmarked(str(error))}") from error
    if nulls := [field.name for field in batch.schema if pa.types.is_null(field.type)]:
        raise ConfigurationError(f"from_rows: column {nulls[0]!r} is null in every row; give its type in schema=")
    return pa.Table.from_batches([batch])


def _row(number: int, row: Any, names: Sequence[str] | None) -> dict[str, Any]:
    if isinstance(row, Mapping) or is_record(row):
        try:
            return owned_row(row)
        except TypeError as error:
            raise ConfigurationError(
                f"from_rows: row {number} has a value that cannot be in a column: {unmarked(str(error))}"
                "; convert the value, or give another type in schema="
            ) from error
    if isinstance(row, tuple | list):
        if names is None:
            raise ConfigurationError(
                f"from_rows: row {number} is a {type(row).__name__}; name its values with columns=['k', 'n'] or schema="
            )
        if len(row) != len(names):
            raise ConfigurationError(
                f"from_rows: row {number} has {len(row)} values, but the columns are {names}"
                "; give as many values as columns"
            )
        return dict(zip(names, row, strict=True))
    if isinstance(row, _SINGLE):
        if names is not None and len(names) != 1:
            raise ConfigurationError(
                f"from_rows: row {number} is a single {type(row).__name__}, but the columns are {names}"
                "; give one value for each column, as a tuple"
            )
        return {VALUE if names is None else names[0]: row}
    raise ConfigurationError(
        f"from_rows: row {number} is a {type(row).__name__}; a row is a dict, a dataclass object, a tuple, a string or "
        "a number"
        "; convert it to one of these"
    )


def without_pandas(data: Any) -> Any:
    """Returns the argument of `from_batches` with pandas frames, alone or in a list, converted to Arrow tables."""
    pandas = sys.modules.get("pandas")
    if pandas is None:
        return data
    if isinstance(data, list | tuple):
        return [_of_pandas(part) if isinstance(part, pandas.DataFrame) else part for part in data]
    return _of_pandas(data) if isinstance(data, pandas.DataFrame) else data


def _of_pandas(frame: pd.DataFrame) -> pa.Table:
    """Converts a pandas frame to an Arrow table, with null for NaN and NaT. An index that has no name and a single
    level is dropped.

    Raises ConfigurationError for any other index, and for columns that Arrow does not support.
    """
    index = frame.index
    if index.nlevels > 1 or index.name is not None:
        raise ConfigurationError(
            f"from_batches: the index {list(index.names)} of the pandas DataFrame would be lost; make it columns with "
            "reset_index(), or drop it with reset_index(drop=True)"
        )
    if bad := [name for name in frame.columns if not isinstance(name, str)]:
        raise ConfigurationError(f"from_batches: the name of the pandas column {bad[0]!r} is not a string; rename it")
    try:
        table = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise ConfigurationError(
            f"from_batches: the pandas DataFrame does not fit into Arrow: {error}"
            "; convert the column that the message names"
        ) from error
    for name in table.column_names:
        if frame[name].dtype == object:
            _check_objects(name, frame[name], table[name].combine_chunks())
    return table


def _check_objects(name: str, values: pd.Series, array: pa.Array) -> None:
    """Raises ConfigurationError if the conversion to Arrow has changed a Python object, for example a datetime to a
    date.
    """
    given = [value if valid else None for value, valid in zip(values, array.is_valid().to_pylist(), strict=True)]
    try:
        check_exact(given, array)
    except InexactValueError as error:
        raise ConfigurationError(
            f"from_batches: pandas column {name!r}: {unmarked(str(error))}; give it one type"
        ) from error


def timed(
    stream: Stream,
    timestamp: str | pl.Expr | None,
    max_out_of_orderness: str | timedelta | int,
    uid: str | None,
    idleness: str | timedelta | int | None = None,
    alignment: WatermarkAlignment | None = None,
) -> Stream:
    """Returns the stream with event time from the column `timestamp`, or the stream itself if `timestamp` is None."""
    if timestamp is None:
        if alignment is not None:
            raise ConfigurationError(
                f"alignment={alignment!r} needs event time, and the source has none; name its column with timestamp="
            )
        return stream
    uid = None if uid is None else f"{uid}-timestamps"
    return stream.assign_timestamps(timestamp, max_out_of_orderness, idleness=idleness, alignment=alignment, uid=uid)
