"""`FilesInPlace`: the Parquet files of a DataFrame as a source. They are read where they are, without Spark.

`files_of` requests the plan of a DataFrame from Spark. At submission `place_files` stores a manifest of the files and
rows that the job reads. Rules of the plan:

- A DataFrame whose plan is not fully supported raises NeedsSparkError with the reason. Then Spark reads it.
- Spark's optimized plan is used: it includes cached data, and filters in the form in which Spark evaluates them.
  Supported are a relation over Parquet files, a choice of its columns under any names, and conditions that compare
  columns with constants.
- The list of files, and the column values in folder names, come from Spark.
- Settings that change what Spark reads from a file must have their default value.

Rules of the files:

- The manifest is stored before the job starts: files with size and time of change, columns, the filter. A restored job
  uses the same manifest, even if the DataFrame has changed.
- A split is a sequence of row groups of a file. Its offsets count all rows of the file, also rows that the filter
  drops.
- A file that differs from the manifest fails the job.
- The footer of every file is checked. If one file needs Spark, Spark reads all of them: for example, if Spark finds a
  column under another spelling, or if it is stored in a type which Spark and Arrow may read differently. A missing
  column is null.
- Dates and timestamps of old writers may be in the Julian calendar, which Spark converts or refuses. Accepted are files
  that Spark 3.1 or later wrote without it, and other files whose statistics show that they have no such old values.
  Nested columns are accepted if Spark 3.1 or later wrote them and Arrow gives them the same type.

Rules of the filter (`RowCondition`), which Arrow evaluates with the same results as Spark:

- It uses the three values of SQL. A row is kept if the condition is true, and dropped if it is false or null.
- A comparison has a column on its left and constants of the column's type on its right, none of them null or NaN.
- In Spark NaN is greater than any number; in Arrow it is neither greater nor less.
- In Spark 0.0 equals -0.0 in every comparison; Arrow's `is_in` distinguishes them.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from tidegate.connectors.files.open_file import Advice, FileAt, OpenFile, TakenFile, UnreadableFileError
from tidegate.connectors.pushed_filters import ColumnTest, Rows, rows_renamed
from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
from tidegate.spark_bridge.dataframes.spark_types import arrow_schema_of
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import ConfigurationError, CorruptionError, StorageError
from tidegate.storage.files.envelope import seal, unseal
from tidegate.storage.files.file_system_store import FileSystemStore, join_url, open_store
from tidegate.storage.files.store import Store

MANIFEST_PATH = "_files"
MANIFEST_VERSION = 1
SPLIT_ROWS = 1_000_000
"""Number of rows at which a split ends. It always ends together with a row group."""
_MAGIC = b"TGFILES"
_LOOKS_AT_ONCE = 16
_STAGE = (
    "The files of a DataFrame that only reads files must stay as they are while the job runs, and for whoever restores "
    "it. Put it back as it was, its time of change included, and restore. Or start without restore, with "
    "from_dataframe(stage=True), which writes the rows down when the job is submitted"
)
_ADVICE = Advice(_STAGE, _STAGE, "Shorten the values, or drop the column, before from_dataframe")


@wire
@dataclass(frozen=True, slots=True)
class PlacedRows:
    """A split of a file: its rows from row `first` on.

    `constants` is one row with the values of the partition columns of the file's folder.
    """

    file: FileAt
    first: int
    rows: int
    constants: pa.RecordBatch


@wire
@dataclass(frozen=True, slots=True)
class FilesManifest:
    """The stored description of a job's input: files below `url` with the columns `relation`.

    `stored` has, for each column of `schema`, its name in the files.
    """

    url: str
    schema: pa.Schema
    stored: tuple[str, ...]
    relation: pa.Schema
    condition: RowCondition | None
    splits: tuple[PlacedRows, ...]


@dataclass(frozen=True, slots=True)
class FilesInPlace:
    """A bounded source over the files of a manifest. All batches have `schema`."""

    manifest: FilesManifest
    schema: pa.Schema
    needed: Rows = None
    """The rows that the program needs, in addition to the condition of the DataFrame."""

    @staticmethod
    def of(manifest: FilesManifest) -> FilesInPlace:
        """Returns the source that reads all columns of a manifest."""
        return FilesInPlace(manifest, manifest.schema)

    def splits(self) -> Sequence[SourceSplit]:
        """Returns the splits in the order of the files."""
        return tuple(
            SourceSplit(f"{each.file.path}:{each.first}" if each.first else each.file.path, encode(each), each.rows)
            for each in self.manifest.splits
        )

    def check_unread(self, splits: Sequence[SourceSplit]) -> None:
        """Checks the files that a restored job still has to read. Raises UnreadableFileError, StorageError."""
        store = open_store(self.manifest.url)
        files = {placed.file for placed in map(_placed_rows, splits)}
        with ThreadPoolExecutor(_LOOKS_AT_ONCE, "files") as threads:
            for _ in threads.map(lambda file: TakenFile(store, file, _ADVICE).compare(), files):
                pass

    def projected(self, columns: Sequence[str]) -> FilesInPlace:
        """Returns a copy of the source that reads only these columns."""
        return replace(self, schema=pa.schema([self.schema.field(name) for name in columns]))

    def filtered(self, rows: Rows) -> FilesInPlace:
        """Returns the source restricted to these rows. It may skip all other rows, but does not have to."""
        return replace(self, needed=rows)

    def reader(self) -> SourceReader:
        """Returns a reader of splits for one subtask."""
        return _Reader(self)


class _Reader:
    """Reads the splits of one subtask, one file at a time."""

    def __init__(self, source: FilesInPlace) -> None:
        manifest = source.manifest
        stored = dict(zip(manifest.schema.names, manifest.stored, strict=True))
        self._schema = source.schema
        self._columns = [stored[name] for name in source.schema.names]
        self._condition = manifest.condition
        used = {*self._columns, *(set() if self._condition is None else self._condition.columns)}
        self._read = pa.schema([field for field in manifest.relation if field.name in used])
        self._rows = _both(rows_renamed(stored, source.needed), column_tests(self._condition))
        self._store = open_store(manifest.url)
        self._open: OpenFile | None = None

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Returns the rows of a file for which the condition is true. Raises UnreadableFileError, StorageError."""
        placed = _placed_rows(split)
        if not 0 <= offset <= placed.rows:
            raise ConfigurationError(
                f"from_dataframe: {split.split_id!r} has no row {offset:,}. Restore with the source of the checkpoint"
            )
        return self._rows_from(placed, offset, rows_max)

    def close(self) -> None:
        """Closes the file that is open."""
        self._open = None

    def _rows_from(self, placed: PlacedRows, offset: int, rows_max: int) -> ReadResult:
        if self._open is None or self._open.path != placed.file.path:
            self._open = OpenFile(
                self._store, placed.file, _ADVICE, self._read, self._rows, placed.constants, may_lack=True
            )
        at = placed.first + offset
        end = placed.first + placed.rows
        counts = min(self._open.next_row(at), end)
        batch = self._open.read(at, min(rows_max, end - at)) if counts == at < end else None
        if batch is None and counts == at < end:
            raise UnreadableFileError(f"{placed.file.path} has no row {at:,}. {_ADVICE.unreadable}")
        taken = counts - at if batch is None else batch.num_rows
        kept = None if batch is None else self._kept(batch)
        rows = 0 if kept is None else kept.num_rows
        return ReadResult(kept, offset + taken, at_end=at + taken == end, skipped=taken - rows)

    def _kept(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        if self._condition is not None:
            batch = batch.filter(mask_of(self._condition, batch))
        if not batch.num_rows:
            return None
        return pa.record_batch([batch.column(name) for name in self._columns], schema=self._schema)


def place_files(plan: FilesOfPlan, url: str) -> FilesInPlace:
    """Checks every file of a plan, and stores under `url` the manifest of the rows and columns that a job reads.

    Raises NeedsSparkError if Spark would read one of the files differently, and StorageError.
    """
    root, files = _below_one_folder([(file, _url_of(file.path)) for file in plan.files])
    store = open_store(root)
    used = {*plan.stored, *(set() if plan.condition is None else plan.condition.columns)}
    stored = pa.schema([f for f in plan.relation if f.name in used and f.name not in plan.partitions.names])
    chosen = [(file, path) for file, path in files if _may_have_rows(plan.condition, plan.folders[file.folder])]

    def look(file: FoundFile, path: str) -> list[PlacedRows]:
        return list(_placed(store, file, path, stored, plan.folders[file.folder]))

    with ThreadPoolExecutor(_LOOKS_AT_ONCE, "footers") as threads:
        found = list(threads.map(lambda each: look(*each), chosen))
    splits = tuple(placed for each in found for placed in each)
    manifest = FilesManifest(root, plan.schema, plan.stored, plan.relation, plan.condition, splits)
    open_store(url).create(MANIFEST_PATH, seal(_MAGIC, MANIFEST_VERSION, encode(manifest)))
    return FilesInPlace.of(manifest)


def placed_files(store: Store) -> FilesInPlace | None:
    """Returns the source whose manifest `place_files` has stored in this store, or None if there is none."""
    if not store.exists(MANIFEST_PATH):
        return None
    where = join_url(store.url, MANIFEST_PATH)
    manifest = decode(unseal(_MAGIC, MANIFEST_VERSION, store.read(MANIFEST_PATH), where))
    if not isinstance(manifest, FilesManifest):
        raise CorruptionError(
            f"{where} holds a {type(manifest).__name__}, not what a job reads; start the job without restore"
        )
    return FilesInPlace.of(manifest)


def _placed_rows(split: SourceSplit) -> PlacedRows:
    placed = decode(split.payload)
    if not isinstance(placed, PlacedRows):
        raise ConfigurationError(
            f"split {split.split_id!r} is not of the files of this DataFrame; give the source of the checkpoint, or "
            "start without restore"
        )
    return placed


def _placed(
    store: FileSystemStore, file: FoundFile, path: str, stored: pa.Schema, constants: pa.RecordBatch
) -> Iterator[PlacedRows]:
    """Yields the splits of a file. Raises NeedsSparkError if Spark might read it differently."""
    try:
        at = FileAt.of(store.info(path))
        if at.size_bytes != file.size_bytes:
            raise NeedsSparkError(
                f"{file.path} has changed since Spark has listed it: it had {file.size_bytes} bytes, and has "
                f"{at.size_bytes}"
            )
        parquet = pq.ParquetFile(pa.PythonFile(TakenFile(store, at, _ADVICE).open(), mode="r"))
    except (StorageError, ConfigurationError, pa.ArrowException, OSError, ValueError) as error:
        raise NeedsSparkError(f"{file.path} cannot be read without Spark: {error}") from error
    if (reason := why_only_spark(parquet, stored)) is not None:
        raise NeedsSparkError(f"{file.path} {reason}")
    first = rows = 0
    for group in range(parquet.metadata.num_row_groups):
        rows += parquet.metadata.row_group(group).num_rows
        if rows >= SPLIT_ROWS:
            yield PlacedRows(at, first, rows, constants)
            first = first + rows
            rows = 0
    if rows:
        yield PlacedRows(at, first, rows, constants)


def _url_of(path: str) -> tuple[str, str]:
    """Splits the URL of a file from Spark into the scheme and the path that tidegate's storage uses."""
    scheme, _, rest = path.partition(":")
    if scheme == "file" and rest.startswith("/"):
        return "", "/" + rest.lstrip("/")
    if scheme in ("s3", "s3a", "s3n") and rest.startswith("//"):
        return "s3://", rest.lstrip("/")
    raise NeedsSparkError(f"{path} is in a storage that only Spark can read; tidegate reads files and s3://")


def _below_one_folder(
    files: Sequence[tuple[FoundFile, tuple[str, str]]],
) -> tuple[str, list[tuple[FoundFile, str]]]:
    """Returns the deepest folder that contains all files, and their paths relative to it."""
    if not files:
        raise NeedsSparkError("the DataFrame reads no files")
    schemes = {scheme for _, (scheme, _) in files}
    folder = os.path.commonpath([os.path.dirname(path) for _, (_, path) in files])
    if len(schemes) > 1 or not folder:
        raise NeedsSparkError("the files of the DataFrame are in several storages")
    return schemes.pop() + folder, [(file, os.path.relpath(path, folder)) for file, (_, path) in files]


def _may_have_rows(condition: RowCondition | None, constants: pa.RecordBatch) -> bool:
    """Returns whether a folder with these partition values can contain rows that satisfy the condition."""
    known = set(constants.schema.names)
    judged = (each for each in conjuncts(condition) if each.columns and each.columns <= known)
    return all(mask_of(each, constants)[0].as_py() for each in judged)


def _both(rows: Rows, tests: tuple[ColumnTest, ...]) -> Rows:
    """Returns the rows that the program needs, restricted to rows that pass the filter of the DataFrame."""
    if rows is None:
        return (tests,) if tests else None
    return tuple((*each, *tests) for each in rows)


FILES_MAX = 10_000
"""Limit of the number of files. The driver checks each file, and more would take too long."""
CONSTANTS_MAX = 1_000
_PLANS = "org.apache.spark.sql.catalyst.plans.logical."
_EXPRESSIONS = "org.apache.spark.sql.catalyst.expressions."
_SOURCES = "org.apache.spark.sql.execution.datasources."
_OPTIONS = frozenset(
    [
        "path",
        "paths",
        "basepath",
        "recursivefilelookup",
        "pathglobfilter",
        "modifiedbefore",
        "modifiedafter",
        "mergeschema",
    ]
)
"""Options of a relation that only select files and columns. Spark has already applied them in the plan."""
_SETTINGS = {
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.parquet.fieldId.read.enabled": "false",
    "spark.sql.parquet.int96TimestampConversion": "false",
    "spark.sql.extensions": "",
}
_DEFAULT = "EXISTS_DEFAULT"
_COLLATED = " COLLATE "
"""Texts that mark a default value for columns missing in old files (in metadata), and a string type with a
collation.
"""
_COMPARISONS = {
    "EqualTo": "=",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "EqualNullSafe": "<=>",
}
_MIRRORED = {"=": "=", "<": ">", "<=": ">=", ">": "<", ">=": "<=", "<=>": "<=>"}


class NeedsSparkError(Exception):
    """Raised if only Spark can read a DataFrame. The text is the reason."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that Spark has listed, and the index of its folder in `FilesOfPlan.folders`."""

    path: str
    size_bytes: int
    folder: int


@dataclass(frozen=True, slots=True)
class FilesOfPlan:
    """The files, columns and filter of a DataFrame that only reads files."""

    schema: pa.Schema
    """The columns of the DataFrame."""
    stored: tuple[str, ...]
    """The names of these columns in the files or in folder names."""
    relation: pa.Schema
    """The columns of the files and of folder names."""
    partitions: pa.Schema
    """The columns whose values are in folder names."""
    condition: RowCondition | None
    """The filter, over columns of `relation`. None: all rows."""
    files: tuple[FoundFile, ...]
    folders: tuple[pa.RecordBatch, ...]
    """The values of `partitions` for each folder, one row each."""


def files_of(df: DataFrame) -> FilesOfPlan:
    """Returns the files that a DataFrame reads. Raises NeedsSparkError, and errors from Spark."""
    session = df.sparkSession
    for name, usual in _SETTINGS.items():
        if (value := str(session.conf.get(name, usual) or "").lower()) != usual.lower():
            raise NeedsSparkError(f"the setting {name} of Spark is {value}, and not {usual}")
    return _Reading(df).found()


class _Reading:
    """Analyses the plan of a DataFrame, from its columns down to the files that it reads."""

    def __init__(self, df: DataFrame) -> None:
        self._df = df
        self._given: dict[int, int] = {}
        """The ids of renamed columns, each with the id of the original column."""
        self._names: dict[int, str] = {}
        self._types: dict[str, pa.DataType] = {}

    def found(self) -> FilesOfPlan:
        # Make a new plan: a plan that was made before something was cached does not use the cache.
        plan = self._df.select("*")._jdf.queryExecution().optimizedPlan()
        output = [_id_of(each) for each in _all(plan.output())]
        conditions = []
        while not _is(plan, _SOURCES, "LogicalRelation"):
            if _is(plan, _PLANS, "Project"):
                for each in _all(plan.projectList()):
                    self._project(each)
            elif _is(plan, _PLANS, "Filter"):
                conditions.append(plan.condition())
            else:
                raise NeedsSparkError(f"the plan of the DataFrame has the step {plan.nodeName()}")
            plan = plan.child()
        relation = plan.relation()
        _check_relation(plan, relation)
        partitions = _columns_of(relation.partitionSchema())
        data = _columns_of(relation.dataSchema())
        whole = pa.schema([*(field for field in data if field.name not in partitions.names), *partitions])
        for each in _all(plan.output()):
            if each.name() not in whole.names:
                raise NeedsSparkError(f"the DataFrame uses {each.name()}, which is not a column of the files")
            if _DEFAULT in each.metadata().json() or _COLLATED in each.dataType().sql():
                raise NeedsSparkError(f"the column {each.name()} has a default value or a collation")
            self._names[_id_of(each)] = each.name()
        self._types = {field.name: field.type for field in whole}
        condition: RowCondition | None = None
        for each in conditions:
            part = self._condition(each)
            condition = part if condition is None else RowCondition("and", (part, condition))
        files, folders = self._listed(relation, partitions)
        schema = arrow_schema_of(self._df.schema)
        stored = tuple(self._stored(number) for number in output)
        if [field.type for field in schema] != [self._types[name] for name in stored]:
            raise NeedsSparkError(
                f"the columns of the DataFrame have other types than the columns of its files: {schema}"
            )
        return FilesOfPlan(schema, stored, whole, partitions, condition, files, folders)

    def _project(self, expression: Any) -> None:
        if _is(expression, _EXPRESSIONS, "Alias") and _is(expression.child(), _EXPRESSIONS, "AttributeReference"):
            self._given[_id_of(expression)] = _id_of(expression.child())
        elif not _is(expression, _EXPRESSIONS, "AttributeReference"):
            raise NeedsSparkError(f"the DataFrame computes {expression.sql()}")

    def _stored(self, number: int) -> str:
        while number in self._given:
            number = self._given[number]
        return self._names[number]

    def _condition(self, expression: Any) -> RowCondition:
        name = _name_of(expression)
        children = _all(expression.children())
        if name in ("And", "Or", "Not"):
            return RowCondition(name.lower(), tuple(self._condition(child) for child in children))
        if name in ("IsNull", "IsNotNull") and _is(children[0], _EXPRESSIONS, "AttributeReference"):
            is_null = RowCondition("is_null", (), self._stored(_id_of(children[0])))
            return is_null if name == "IsNull" else RowCondition("not", (is_null,))
        if name in _COMPARISONS:
            first, second, test = *children, _COMPARISONS[name]
            if _is(first, _EXPRESSIONS, "Literal"):
                first, second, test = second, first, _MIRRORED[test]
            return self._compared(expression, test, first, [second])
        if name == "In":
            return self._compared(expression, "in", children[0], children[1:])
        if name == "InSet" and _is(children[0], _EXPRESSIONS, "AttributeReference"):
            column = self._stored(_id_of(children[0]))
            values = _all(expression.hset().toSeq())
            return compared("in", column, _array_of(values, self._types[column], expression.sql()))
        if name == "AttributeReference":
            return compared("=", self._stored(_id_of(expression)), pa.array([True]))
        raise NeedsSparkError(f"the DataFrame filters by {expression.sql()}")

    def _compared(self, expression: Any, test: str, left: Any, constants: list[Any]) -> RowCondition:
        plain = _is(left, _EXPRESSIONS, "AttributeReference") and len(constants) <= CONSTANTS_MAX
        if not plain or not all(_is(constant, _EXPRESSIONS, "Literal") for constant in constants):
            raise NeedsSparkError(f"the DataFrame filters by {expression.sql()}")
        column = self._stored(_id_of(left))
        values = [constant.value() for constant in constants]
        return compared(test, column, _array_of(values, self._types[column], expression.sql()))

    def _listed(self, relation: Any, partitions: pa.Schema) -> tuple[tuple[FoundFile, ...], tuple[pa.RecordBatch, ...]]:
        types = relation.partitionSchema()
        jvm: Any = self._df.sparkSession._jvm
        nothing = getattr(getattr(jvm.scala.collection.immutable, "Nil$"), "MODULE$")
        files: list[FoundFile] = []
        folders: list[pa.RecordBatch] = []
        for folder in _all(relation.location().listFiles(nothing, nothing)):
            row = folder.values()
            folders.append(
                pa.record_batch(
                    [
                        _array_of([row.get(at, types.apply(at).dataType())], field.type, field.name, nulls=True)
                        for at, field in enumerate(partitions)
                    ],
                    schema=partitions,
                )
                if len(partitions)
                else pa.record_batch({})
            )
            listed = _all(folder.files())
            if len(files) + len(listed) > FILES_MAX:
                raise NeedsSparkError(f"the DataFrame reads more than {FILES_MAX:,} files")
            files += [FoundFile(f.getPath().toString(), int(f.getLen()), len(folders) - 1) for f in listed]
        return tuple(files), tuple(folders)


def _check_relation(plan: Any, relation: Any) -> None:
    if plan.isStreaming() or not _is(relation, _SOURCES, "HadoopFsRelation"):
        raise NeedsSparkError("the DataFrame does not read a folder of files")
    kind = relation.fileFormat().getClass().getName()
    location = relation.location().getClass().getName()
    if kind != f"{_SOURCES}parquet.ParquetFileFormat":
        raise NeedsSparkError(
            f"the DataFrame reads files of the format {relation.fileFormat().toString()}, not Parquet"
        )
    if location != f"{_SOURCES}InMemoryFileIndex":
        raise NeedsSparkError(f"the files of the DataFrame are listed by {location.rpartition('.')[2]}")
    options = relation.options()
    unknown = sorted(name for name in _all(options.keys().toSeq()) if name.lower() not in _OPTIONS)
    if unknown:
        raise NeedsSparkError(f"the DataFrame has the option {unknown[0]!r}")


def _columns_of(schema: Any) -> pa.Schema:
    found = StructType.fromJson(json.loads(schema.json()))
    return arrow_schema_of(found) if found.fields else pa.schema([])


def _array_of(values: list[Any], kind: pa.DataType, where: str, *, nulls: bool = False) -> pa.Array:
    """Converts constants from Spark's representation to an array of the column's type."""
    types = pa.types
    if None in values and not nulls:
        raise NeedsSparkError(f"the DataFrame compares with null ({where})")
    if types.is_string(kind):
        return pa.array([None if value is None else value.toString() for value in values], kind)
    if types.is_floating(kind):
        if any(value is not None and math.isnan(value) for value in values):
            raise NeedsSparkError(f"the DataFrame compares with NaN ({where})")
        return pa.array(values, kind)
    if types.is_date32(kind):
        return pa.array(values, pa.int32()).view(kind)
    if types.is_timestamp(kind):
        return pa.array(values, pa.int64()).view(kind)
    if types.is_integer(kind) or types.is_boolean(kind):
        return pa.array(values, kind)
    raise NeedsSparkError(f"the DataFrame has constants of type {kind} ({where})")


def _all(sequence: Any) -> list[Any]:
    return list(_each(sequence))


def _each(sequence: Any) -> Iterator[Any]:
    for at in range(sequence.size()):
        yield sequence.apply(at)


def _id_of(expression: Any) -> int:
    return int(expression.exprId().id())


def _name_of(expression: Any) -> str:
    name: str = expression.getClass().getName()
    return name.removeprefix(_EXPRESSIONS)


def _is(node: Any, package: str, name: str) -> bool:
    return bool(node.getClass().getName() == f"{package}{name}")


_KERNELS = {"=": pc.equal, "<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal}
_AS_TESTS = {"=": "==", "<": "<", "<=": "<=", ">": ">", ">=": ">=", "in": "is_in"}
_CONSTANTS = "constants"


@wire
@dataclass(frozen=True, slots=True)
class RowCondition:
    """A node of a filter condition on rows. `and`, `or` and `not` have parts. `is_null` and comparisons have a
    column.
    """

    test: str
    parts: tuple[RowCondition, ...] = ()
    column: str = ""
    constants: pa.RecordBatch | None = None
    """One column with the constant of a comparison, or with all constants of `in`."""

    @property
    def columns(self) -> set[str]:
        """Returns the names of the columns that the condition reads."""
        return ({self.column} if self.column else set()).union(*(part.columns for part in self.parts))


def compared(test: str, column: str, constants: pa.Array) -> RowCondition:
    """Returns the condition that compares a column with constants: `=`, `<`, `<=`, `>`, `>=`, `<=>` or `in`."""
    return RowCondition(test, (), column, pa.record_batch([constants], [_CONSTANTS]))


def mask_of(condition: RowCondition, batch: pa.RecordBatch) -> pa.Array:
    """Evaluates a condition. Returns true, false or null for each row."""
    match condition.test:
        case "and" | "or":
            first, second = (mask_of(part, batch) for part in condition.parts)
            return pc.and_kleene(first, second) if condition.test == "and" else pc.or_kleene(first, second)
        case "not":
            return pc.invert(mask_of(condition.parts[0], batch))
        case "is_null":
            return pc.is_null(batch.column(condition.column))
    return _compared(condition, batch.column(condition.column))


def conjuncts(condition: RowCondition | None) -> list[RowCondition]:
    """Splits a condition into the parts that must all be true."""
    if condition is None:
        return []
    if condition.test == "and":
        return [each for part in condition.parts for each in conjuncts(part)]
    return [condition]


def column_tests(condition: RowCondition | None) -> tuple[ColumnTest, ...]:
    """Returns tests of columns that every kept row passes. Dropped rows may pass them, too."""
    found = (_test_of(each) for each in conjuncts(condition))
    return tuple(test for test in found if test is not None)


def _compared(condition: RowCondition, values: pa.Array) -> pa.Array:
    assert condition.constants is not None
    constants = condition.constants.column(0)
    if condition.test == "in":
        found = pc.is_in(_without_negative_zero(values), _without_negative_zero(constants))
        return pc.if_else(pc.is_valid(values), found, pa.scalar(None, pa.bool_()))
    if condition.test == "<=>":
        return pc.fill_null(pc.equal(values, constants[0]), False)
    found = _KERNELS[condition.test](values, constants[0])
    if condition.test in (">", ">=") and pa.types.is_floating(values.type):
        found = pc.or_kleene(found, pc.is_nan(values))
    return found


def _without_negative_zero(values: pa.Array) -> pa.Array:
    return pc.add(values, pa.scalar(0.0, values.type)) if pa.types.is_floating(values.type) else values


def _test_of(condition: RowCondition) -> ColumnTest | None:
    match condition.test, condition.parts:
        case "is_null", _:
            return ColumnTest(condition.column, "is_null")
        case "not", (RowCondition(test="is_null", column=column),):
            return ColumnTest(column, "is_not_null")
    test = _AS_TESTS.get("=" if condition.test == "<=>" else condition.test)
    if test is None or condition.constants is None:
        return None
    # A DataFrame without filters need not load polars.
    import polars as pl

    values = pl.Series(pl.from_arrow(condition.constants.column(0)))
    constant = pl.lit(values.implode()) if test == "is_in" else pl.lit(values).first()
    return ColumnTest(condition.column, test, constant.meta.serialize())


_WRITER = b"org.apache.spark.version"
_OLD_CALENDARS = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")
_NEW_CALENDAR = (3, 1)
"""First version of Spark whose files record whether their values use the old calendar."""
_GREGORIAN_SINCE = dt.date(1900, 1, 1)
"""From this date on all calendars and time zones agree, with the same margin as in Spark."""


def why_only_spark(parquet: pq.ParquetFile, wanted: pa.Schema) -> str | None:
    """Returns why Arrow might read these columns differently from Spark, or None if it reads them in the same way.

    The reason continues a sentence that begins with the name of the file.
    """
    keys = parquet.metadata.metadata or {}
    by_spark = _spark_version(keys) >= _NEW_CALENDAR and not any(old in keys for old in _OLD_CALENDARS)
    stored = parquet.schema_arrow
    for field in wanted:
        alike = [name for name in stored.names if name.lower() == field.name.lower()]
        if not alike:
            continue
        if alike != [field.name]:
            return f"has {field.name} as {', '.join(alike)}"
        if pa.types.is_nested(field.type):
            if not by_spark or not _same(stored.field(field.name).type, field.type):
                return f"has {field.name} as {stored.field(field.name).type}, which only Spark surely reads alike"
            continue
        column = _leaf(parquet, field.name)
        if column is None or not _reads_alike(column, field.type):
            return f"stores {field.name} in another way than as {field.type}"
        if pa.types.is_temporal(field.type) and not by_spark and not _is_modern(parquet, field.name):
            return f"may have values of {field.name} in an older calendar"
    return None


def _spark_version(keys: dict[bytes, bytes]) -> tuple[int, ...]:
    parts = keys.get(_WRITER, b"").split(b".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()


def _leaf(parquet: pq.ParquetFile, name: str) -> Any:
    found = [parquet.schema[at] for at in range(len(parquet.schema)) if parquet.schema[at].path == name]
    return found[0] if len(found) == 1 and found[0].max_repetition_level == 0 else None


def _reads_alike(column: Any, kind: pa.DataType) -> bool:
    """Returns whether Spark and Arrow read a column of simple values in this stored form in the same way, for a
    type.
    """
    types = pa.types
    logical = json.loads(column.logical_type.to_json())
    name = logical.get("Type", "None")
    physical = column.physical_type
    if name in ("None", "Undefined") and (plain := _PLAIN.get(physical)) is not None:
        return bool(plain(kind))
    if name == "Int" and types.is_signed_integer(kind):
        return bool(logical["isSigned"]) and logical["bitWidth"] == kind.bit_width
    if name == "String":
        return bool(types.is_string(kind))
    if name == "Date":
        return bool(types.is_date32(kind))
    if name == "Timestamp" and types.is_timestamp(kind):
        exact = logical["timeUnit"] in ("milliseconds", "microseconds")
        return exact and bool(logical["isAdjustedToUTC"]) == (kind.tz is not None)
    if name == "Decimal" and types.is_decimal128(kind):
        return bool(logical["precision"] == kind.precision and logical["scale"] == kind.scale)
    return False


_PLAIN: dict[str, Callable[[pa.DataType], bool]] = {
    "BOOLEAN": pa.types.is_boolean,
    "INT32": pa.types.is_int32,
    "INT64": pa.types.is_int64,
    "FLOAT": pa.types.is_float32,
    "DOUBLE": pa.types.is_float64,
    "BYTE_ARRAY": pa.types.is_binary,
    "INT96": lambda kind: pa.types.is_timestamp(kind) and kind.tz is not None,
}
"""For each physical type, the types of columns that need no logical type in the file, such as Spark's usual
timestamps.
"""


def _is_modern(parquet: pq.ParquetFile, name: str) -> bool:
    """Returns whether statistics of the file prove that all values of a column are after the switch from the Julian to
    the Gregorian calendar.
    """
    at = next(at for at in range(len(parquet.schema)) if parquet.schema[at].path == name)
    for group in range(parquet.metadata.num_row_groups):
        statistics = parquet.metadata.row_group(group).column(at).statistics
        if statistics is None or not statistics.has_min_max:
            if statistics is not None and statistics.null_count == parquet.metadata.row_group(group).num_rows:
                continue
            return False
        least = statistics.min
        if isinstance(least, dt.datetime):
            least = least.date()
        if not isinstance(least, dt.date) or least < _GREGORIAN_SINCE:
            return False
    return True


def _same(stored: pa.DataType, kind: pa.DataType) -> bool:
    """Returns whether nested types are equal, apart from the names of list elements and nullability."""
    types = pa.types
    if types.is_list(kind):
        return types.is_list(stored) and _same(stored.value_type, kind.value_type)
    if types.is_map(kind):
        keys_and_items = types.is_map(stored) and _same(stored.key_type, kind.key_type)
        return keys_and_items and _same(stored.item_type, kind.item_type)
    if types.is_struct(kind):
        fields = types.is_struct(stored) and [each.name for each in stored] == [each.name for each in kind]
        return fields and all(_same(stored.field(each.name).type, each.type) for each in kind)
    return bool(stored.equals(kind))
