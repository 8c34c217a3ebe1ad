"""`StreamSources`: begins streams: from memory, files, Kafka, Spark DataFrames, a rate, and sources of your own.

`StreamEnvironment` inherits these methods, and adds those that run the streams.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.api.program import Program
from tidegate.api.streams.given_rows import table_of_rows, without_pandas
from tidegate.api.streams.steps.other_names import ENVIRONMENTS, OtherNames
from tidegate.api.streams.steps.slot_options import checked_group
from tidegate.api.streams.stream import Stream, timed
from tidegate.connectors.bad_rows import BAD_ROWS, BadRows, check_bad_rows
from tidegate.connectors.files.delta_source import DeltaSource
from tidegate.connectors.files.file_source import FileForm, FolderSource, source_of_files
from tidegate.connectors.files.formats import FileFormat
from tidegate.connectors.files.patterns import FilePattern
from tidegate.connectors.kafka.client import Start, check_start, client_settings, kafka
from tidegate.connectors.kafka.kafka_reader import OnMissing
from tidegate.connectors.kafka.kafka_source import KafkaSource
from tidegate.connectors.kafka.records import TIMESTAMP, RecordFormat
from tidegate.connectors.memory_source import InMemory, MemorySource
from tidegate.connectors.rate_source import RateSource
from tidegate.connectors.socket_source import SocketSource
from tidegate.connectors.source import DeadLetterSource, Source
from tidegate.operators.watermarks.watermark_generator import WatermarkAlignment
from tidegate.protocol.side_outputs import OutputTag
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.row_schemas import SchemaLike, as_schema
from tidegate.storage.units import parse_duration_ms, parse_size_bytes

if TYPE_CHECKING:
    import polars as pl
    import ray.data
    from pyspark.sql import DataFrame

FOLDER_SPLITS = 16
"""Splits of a folder that grows."""
MAX_FILE_AGE = "7d"
"""For so long a folder that grows remembers files, and takes those that come late."""
LANES_A_SUBTASK = 2
"""Lanes (splits) in the log of a streaming DataFrame, for each subtask that its source has when the log is made."""
IDLENESS = "1min"
"""A lane of a streaming DataFrame without rows for this long does not hold event time back any more."""
LOG_LIMIT = "1gb"
"""Bytes of rows of a streaming DataFrame that may wait for a checkpoint to cover them."""


class StreamSources(OtherNames):
    """Begins streams of one program."""

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
        """A stream over data in memory: Arrow, polars or pandas. The data travels with the job: keep it small.

        Rows are read in their order, by one subtask. With `splits` they are cut into that many parts, which are dealt
        out to the subtasks and read side by side; rows of different parts then come in any order, also rows of one
        key. A restored job needs the same data and splits. With `timestamp`, event time comes from this column, and
        `alignment` says which sources wait for each other, as with `Stream.assign_timestamps`.
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
        """A stream over rows that are Python objects: `env.from_rows([{"k": "a", "n": 1}, {"k": "b", "n": 2}])`.

        A row is a dict, a dataclass object or a named tuple; or a tuple, whose names are `columns`; or a string or a
        number, which becomes the column `value`. Types are those of the values, or of `schema`
        (`{"k": str, "n": int}`, a dataclass, a `pa.schema`). The other parameters are those of `from_batches`.
        Raises ConfigurationError for rows that have no common columns and types.
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
        """A stream over a Spark DataFrame, bounded or streaming.

        With `timestamp`, event time comes from this column; `alignment` is as with `Stream.assign_timestamps`.

        Bounded: when the job is executed, Spark's executors write the rows to files, once. The job reads these files,
        so what it replays after a failure is exactly what it read before. A DataFrame that only reads Parquet files,
        with columns chosen and rows filtered, is read from these, which must stay as they are. `stage=True` writes
        its rows down all the same; with `stage=False` it is an error if Spark is needed (`docs/sources.md`).

        Streaming (`spark.readStream...`): a Spark query runs in this driver, as long as the job. Each micro-batch lands
        exactly once in a log, which the job follows. The log has lanes, and the slowest lane decides event time. See
        `docs/streaming-dataframes.md`. These settings raise ConfigurationError with a bounded DataFrame:

        - `idleness`: a lane without rows for so long, a minute by default, does not hold event time back any more.
        - `trigger`: how far apart micro-batches begin (Spark's `processingTime`); without it, one follows the other.
        - `log_limit`: the query waits while more bytes of rows, 1 GB by default, are not covered by a checkpoint.
        - `spark_checkpoint`: a folder for Spark's own checkpoint, needed if the job's checkpoints are in a bucket.
        """
        from tidegate.spark_bridge import DataFrameSource, StreamingDataFrameSource, StreamSettings

        source: Source
        if df.isStreaming:
            if stage is not None:
                raise ConfigurationError(
                    "from_dataframe(stage=): it is for bounded DataFrames, and this one has no end"
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
        """A stream over a `ray.data.Dataset`.

        When the job is executed, tasks of Ray Data compute the dataset and write its rows to files, once. The job reads
        these files, so what it replays after a failure, or in a restored job, is exactly what it read before. Ray Data
        needs free CPUs for that, beside the slots of the job. Each block is at least one file, which is one split, and
        rows keep their order within a block.

        Columns and types are those of the dataset, of which Ray Data may have to compute the first block; `schema`
        takes its place. Columns of tensors and of pickled objects are refused by name, as are blocks that differ.
        `timestamp`, `max_out_of_orderness` and `alignment` are as with `from_dataframe`. See `docs/sources.md`.
        """
        from tidegate.connectors.ray_data.dataset_source import RayDatasetSource

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
        """A stream over Parquet, CSV, JSON or text files: `/in/*.parquet`, `s3://bucket/in/**/*.csv.gz`, or `/in/`.

        `/in/` means all files in that folder. A list of paths or patterns means all of their files.

        Without `discover` it is bounded: the files that are there when the job is submitted. With `discover="10s"` it
        goes on, and looks for new files so often; each is read once, whatever is restarted (`docs/sources.md`).

        `schema` says columns and types; without it they are those of the first file. Of Parquet and CSV only `columns`
        are read. With `partitions` its columns stand in the names of folders, as Spark writes them (`day=2013-01-01/`),
        and come last. `options` has options of Spark for CSV, JSON and text, by their names: `{"sep": ";"}`.

        A row that cannot be read fails the job. With `bad_rows="skip"` it is left out, counted and logged; with
        `bad_rows="side"` it is in the stream `bad_rows()` of the result, with its place and the reason. So is the rest
        of a file that is damaged. A row of text has at most `max_row_size` bytes. Of Parquet a row of which few bytes
        stand in the file, and a page, may have 256 MB, or `max_row_size` if that is more.

        With `discover`: files are dealt out to `splits` (16) by their names, and read in the order in which they were
        last changed. Files are remembered for `max_file_age` (7 days) behind the newest; what is older when it comes is
        left out. A split without files for `idleness` (a minute) does not hold event time back any more.
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
                raise ConfigurationError(f"from_files(discover={discover!r}, splits={lanes}): both must be positive")
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
        """A stream over a Delta Lake table, read from its files without Spark (`pip install tidegate[delta]`).

        It is bounded: `version`, or the newest one when the job is submitted. A restored job goes on in the version
        that the first one has read. Raises ConfigurationError for tables with deletion vectors or column mapping
        (`docs/delta.md`).
        """
        source = DeltaSource.open(os.fspath(url), version)
        stream = self.from_source(
            source, name=name, uid=uid, parallelism=parallelism, slot_sharing_group=slot_sharing_group
        )
        return timed(stream, timestamp, max_out_of_orderness, uid, alignment=alignment)

    def from_kafka(
        self,
        servers: str,
        *,
        topics: Sequence[str],
        value: SchemaLike | Literal["bytes", "string"] = "bytes",
        key: Literal["bytes", "string"] | None = None,
        metadata: Sequence[str] = (),
        start: Start = "earliest",
        end: Literal["latest"] | None = None,
        discover: str | timedelta | int | None = None,
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
        """A stream of the records of topics, from the brokers at "host:port,host:port" (`pip install tidegate[kafka]`).

        With a schema as `value` records are JSON objects, a column for each field; `key` adds the column `kafka_key`. A
        schema is a pyarrow Schema, types such as `{"user": str, "n": int}`, a dataclass, a TypedDict or a NamedTuple.
        With "bytes" or "string" the columns are Spark's: key, value, topic, partition, offset and timestamp. `metadata`
        adds columns: "topic", "partition", "offset", "timestamp", "headers" and "tombstone", whether a record has no
        value. Beside a schema they are called `kafka_topic` and so on.

        It begins at `start`: "earliest", "latest", a time (a datetime, or milliseconds since 1970), or offsets
        (`{"bids": {0: 17, 1: 4}}`). With `end="latest"` it ends behind what is there at submission. With
        `discover="1min"` partitions that are added later are found. A record that cannot be read fails the job, or is
        left out with a warning (`bad_rows="skip"`). `properties` are settings of librdkafka.

        Where the next record of a checkpoint is not there any more, because it was deleted or because the topic was
        created again, the job fails, or it goes on at the begin or the end of the partition with a warning
        (`on_missing="earliest"` or `"latest"`).

        With `timestamp="kafka"` event time is that of the records, else that of a column. A partition without records
        for `idleness` (never, by default) does not hold it back.
        """
        policy = check_bad_rows(bad_rows, "from_kafka")
        if end not in (None, "latest"):
            raise ConfigurationError(f"from_kafka(end={end!r}): it is 'latest' or None")
        if on_missing not in ("fail", "earliest", "latest"):
            raise ConfigurationError(f"from_kafka(on_missing={on_missing!r}): it is 'fail', 'earliest' or 'latest'")
        if isinstance(topics, str) or not topics:
            raise ConfigurationError(f"from_kafka(topics={topics!r}): give a list of names")
        if end is not None and discover is not None:
            raise ConfigurationError("from_kafka: what ends finds no new partitions: leave end= or discover= out")
        check_start(start)
        kafka()
        kind: Any = value if isinstance(value, str) else as_schema(value, "from_kafka(value=)")
        by_record = isinstance(timestamp, str) and timestamp == "kafka"
        timed_by = ("timestamp",) if by_record and isinstance(kind, pa.Schema) else ()
        form = RecordFormat(kind, key, tuple(dict.fromkeys((*timed_by, *metadata))))
        every_ms = None if discover is None else parse_duration_ms(discover, setting="from_kafka(discover)")
        given = tuple((properties or {}).items())
        client_settings(servers, dict(given))
        source = KafkaSource(servers, tuple(topics), form, start, end is not None, every_ms, given, policy, on_missing)
        stream = self.from_source(
            source, name=name, uid=uid, parallelism=parallelism, slot_sharing_group=slot_sharing_group
        )
        column = timestamp if not by_record else TIMESTAMP if isinstance(kind, pa.Schema) else "timestamp"
        return timed(stream, column, max_out_of_orderness, uid, idleness, alignment)

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
        """A stream of numbered rows, so many a second, for demos and benchmarks (Spark's `rate`, Flink's `datagen`).

        Its columns are `timestamp`, when the row was due, and `value`, the number of the row; make others of them with
        `select`. It ends after `rows` rows, or never. No row comes early, and none is left out: what is overdue after a
        restore comes at once. Without a rate (None) rows come as fast as they are taken, and are dated 1 ms apart.

        Rows come in the order of their numbers, from one subtask. With `splits` every n-th row is in the same split,
        and splits are read side by side. Rows of different splits then come in any order, also rows of one key.

        With `timestamp="timestamp"` that is event time. A restored job needs the same rate, rows and splits.
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
        """A stream of lines, in the column `value`, from whoever listens at `host` and `port`, such as `nc -lk 9999`.

        For demos: it connects again after a failure, and lines that had been read and are in no checkpoint are lost.
        Raises ConfigurationError unless `lossy=True` accepts that. It ends when the other side closes. A line that is
        not UTF-8, or has more than a mebibyte, fails the job, or is left out as `bad_rows` of `from_files` says.
        """
        policy = check_bad_rows(bad_rows, "from_socket")
        if not lossy:
            raise ConfigurationError(
                "from_socket: a socket cannot be read twice, so lines are lost whenever the job restarts, whatever its "
                "checkpoints are; accept that with lossy=True, or let Kafka or files stand in between"
            )
        return self.from_source(
            SocketSource(host, port, policy), name=name, uid=uid, parallelism=1, slot_sharing_group=slot_sharing_group
        )

    def from_source(
        self,
        source: Source,
        *,
        name: str = "source",
        uid: str | None = None,
        parallelism: int | None = None,
        slot_sharing_group: str | None = None,
    ) -> Stream:
        """A stream over a source of your own (see `tg.Source`)."""
        lacks = [name for name in ("schema", "splits", "reader") if not hasattr(source, name)]
        if lacks or isinstance(source, type):
            what = f"has no {', '.join(lacks)}" if lacks else "is a class; give an object"
            raise ConfigurationError(f"from_source takes an object like tg.Source; {source!r} {what}")
        if self._program.given_up:
            self._program.clear()
        node = StreamNode(
            uid=self._program.new_uid(name, uid),
            name=name,
            parallelism=parallelism if parallelism is not None else self._program.parallelism,
            schema=source.schema,
            source=source,
            slot_group=checked_group(name, slot_sharing_group),
            side_outputs=_dead_letters(source),
        )
        self._program.add_node(node)
        return Stream(self._program, ((node, None),))


def _paths(files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> str | list[str]:
    """What `from_files` was given. Raises ConfigurationError for anything but paths."""
    if isinstance(files, str | os.PathLike):
        return os.fspath(files)
    if isinstance(files, Sequence) and files and all(isinstance(each, str | os.PathLike) for each in files):
        return [os.fspath(each) for each in files]
    raise ConfigurationError(
        f"from_files({files!r}): give a path or a pattern, such as '/in/*.parquet', or a list of some"
    )


def _dead_letters(source: Source) -> tuple[OutputTag, ...]:
    """The side output of the dead letters of a source, if a program may read them."""
    schema = source.bad_rows_schema if isinstance(source, DeadLetterSource) else None
    return () if schema is None else (OutputTag(BAD_ROWS, schema),)


_UNBOUNDED = {
    "from_dataframe": "streaming DataFrames, and this one is bounded",
    "from_files": "a folder that is looked at again, and without discover= it is bounded",
}


def _refuse_for_bounded(method: str, **settings: object) -> None:
    """Raise ConfigurationError where a bounded input was given settings of those without an end."""
    given = [name for name, value in settings.items() if value is not None]
    if given:
        raise ConfigurationError(
            f"{method}: {', '.join(settings)} are for {_UNBOUNDED[method]}: leave {' and '.join(given)} out"
        )
