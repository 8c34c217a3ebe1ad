"""What a DataFrame does, if it does nothing but read files: `files_of` asks Spark for its plan.

Rules:

- What is not surely understood is a `NeedsSparkError`, which says what it is. Then Spark has to do the work.
- Spark's optimized plan counts: it has what was cached, and filters as they are evaluated. Understood are a relation
  over Parquet files, a choice of its columns under any names, and conditions that compare columns with constants.
- Files, and the values of columns that stand in the names of folders, are those that Spark has found.
- Settings that change what Spark reads from a file are none that are known here, or they have their usual value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from tidegate.spark_bridge.dataframes.in_place.row_condition import RowCondition, compared
from tidegate.spark_bridge.dataframes.spark_types import arrow_schema_of

FILES_MAX = 10_000
"""Of more files nobody looks at each one while the driver waits."""
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
"""Options of a relation that say which files and columns there are: Spark has decided that by then."""
_SETTINGS = {
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.parquet.fieldId.read.enabled": "false",
    "spark.sql.parquet.int96TimestampConversion": "false",
    "spark.sql.extensions": "",
}
_DEFAULT, _COLLATED = "EXISTS_DEFAULT", " COLLATE "
"""What old files of a catalog's table have in a newer column; and strings that are not compared by their bytes."""
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
    """Spark has more to do than to read files; the text says what."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file as Spark has listed it, and the number of its folder."""

    path: str
    size_bytes: int
    folder: int


@dataclass(frozen=True, slots=True)
class FilesOfPlan:
    """A DataFrame that only reads files."""

    schema: pa.Schema
    """Columns of the DataFrame."""
    stored: tuple[str, ...]
    """What they are called in the files, or in the names of folders."""
    relation: pa.Schema
    """All columns of the files and of their folders."""
    partitions: pa.Schema
    """Those of folders."""
    condition: RowCondition | None
    """Over columns of `relation`."""
    files: tuple[FoundFile, ...]
    folders: tuple[pa.RecordBatch, ...]
    """One row each: the values of `partitions`."""


def files_of(df: DataFrame) -> FilesOfPlan:
    """The files that a DataFrame reads. Raises NeedsSparkError, and what Spark raises."""
    session = df.sparkSession
    for name, usual in _SETTINGS.items():
        if (value := str(session.conf.get(name, usual) or "").lower()) != usual.lower():
            raise NeedsSparkError(f"{name} is {value}")
    return _Reading(df).found()


class _Reading:
    """Walks the plan from the columns of the DataFrame down to the files."""

    def __init__(self, df: DataFrame) -> None:
        self._df = df
        self._given: dict[int, int] = {}
        """Ids of columns that a step gives another name, and those of what they are."""
        self._names: dict[int, str] = {}
        self._types: dict[str, pa.DataType] = {}

    def found(self) -> FilesOfPlan:
        # A plan that was made before something was cached does not know of it.
        plan = self._df.select("*")._jdf.queryExecution().optimizedPlan()
        output, conditions = [_id_of(each) for each in _all(plan.output())], []
        while not _is(plan, _SOURCES, "LogicalRelation"):
            if _is(plan, _PLANS, "Project"):
                for each in _all(plan.projectList()):
                    self._project(each)
            elif _is(plan, _PLANS, "Filter"):
                conditions.append(plan.condition())
            else:
                raise NeedsSparkError(f"its plan has {plan.nodeName()}")
            plan = plan.child()
        relation = plan.relation()
        _check_relation(plan, relation)
        partitions, data = _columns_of(relation.partitionSchema()), _columns_of(relation.dataSchema())
        whole = pa.schema([*(field for field in data if field.name not in partitions.names), *partitions])
        for each in _all(plan.output()):
            if each.name() not in whole.names:
                raise NeedsSparkError(f"it uses {each.name()}, which is no column of the files")
            if _DEFAULT in each.metadata().json() or _COLLATED in each.dataType().sql():
                raise NeedsSparkError(f"{each.name()} has a default value or a collation")
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
            raise NeedsSparkError("its columns have other types than those of its files")
        return FilesOfPlan(schema, stored, whole, partitions, condition, files, folders)

    def _project(self, expression: Any) -> None:
        if _is(expression, _EXPRESSIONS, "Alias") and _is(expression.child(), _EXPRESSIONS, "AttributeReference"):
            self._given[_id_of(expression)] = _id_of(expression.child())
        elif not _is(expression, _EXPRESSIONS, "AttributeReference"):
            raise NeedsSparkError(f"it computes {expression.sql()}")

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
        raise NeedsSparkError(f"it filters by {expression.sql()}")

    def _compared(self, expression: Any, test: str, left: Any, constants: list[Any]) -> RowCondition:
        plain = _is(left, _EXPRESSIONS, "AttributeReference") and len(constants) <= CONSTANTS_MAX
        if not plain or not all(_is(constant, _EXPRESSIONS, "Literal") for constant in constants):
            raise NeedsSparkError(f"it filters by {expression.sql()}")
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
                raise NeedsSparkError(f"it reads more than {FILES_MAX:,} files")
            files += [FoundFile(f.getPath().toString(), int(f.getLen()), len(folders) - 1) for f in listed]
        return tuple(files), tuple(folders)


def _check_relation(plan: Any, relation: Any) -> None:
    if plan.isStreaming() or not _is(relation, _SOURCES, "HadoopFsRelation"):
        raise NeedsSparkError("it reads what is no folder of files")
    kind, location = relation.fileFormat().getClass().getName(), relation.location().getClass().getName()
    if kind != f"{_SOURCES}parquet.ParquetFileFormat":
        raise NeedsSparkError(f"how Spark reads {relation.fileFormat().toString()} files only Spark knows")
    if location != f"{_SOURCES}InMemoryFileIndex":
        raise NeedsSparkError(f"its files are listed by {location.rpartition('.')[2]}")
    options = relation.options()
    unknown = sorted(name for name in _all(options.keys().toSeq()) if name.lower() not in _OPTIONS)
    if unknown:
        raise NeedsSparkError(f"it has the option {unknown[0]}")


def _columns_of(schema: Any) -> pa.Schema:
    found = StructType.fromJson(json.loads(schema.json()))
    return arrow_schema_of(found) if found.fields else pa.schema([])


def _array_of(values: list[Any], kind: pa.DataType, where: str, *, nulls: bool = False) -> pa.Array:
    """Constants as Spark keeps them, in the type of a column."""
    types = pa.types
    if None in values and not nulls:
        raise NeedsSparkError(f"it compares with null ({where})")
    if types.is_string(kind):
        return pa.array([None if value is None else value.toString() for value in values], kind)
    if types.is_floating(kind):
        if any(value is not None and math.isnan(value) for value in values):
            raise NeedsSparkError(f"it compares with NaN ({where})")
        return pa.array(values, kind)
    if types.is_date32(kind):
        return pa.array(values, pa.int32()).view(kind)
    if types.is_timestamp(kind):
        return pa.array(values, pa.int64()).view(kind)
    if types.is_integer(kind) or types.is_boolean(kind):
        return pa.array(values, kind)
    raise NeedsSparkError(f"it has constants of type {kind} ({where})")


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
