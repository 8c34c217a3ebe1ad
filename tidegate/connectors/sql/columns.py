"""Describes columns of database tables, and converts rows to the types that are sent to the database.

Rules:

- When the program is created, the types decide whether a column of a stream fits a column of the table.
- Values are checked before rows are written to checkpoint storage (`conform`). A commit happens after its checkpoint
  completed, so a value that the database refuses then would block the job permanently. Constraints that only the
  database can check (unique indexes, foreign keys, CHECK) still fail at the commit.
- No value is changed silently: a number that does not fit, digits that a decimal lacks and fractions of a second that a
  column cannot store are errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.connectors.formats.text import times_beyond_a_day
from tidegate.state.kernels.columns import plain
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import decoded_type
from tidegate.storage.user_values import value_text

Accepts = Literal[
    "bool", "int", "float32", "float64", "decimal", "text", "binary", "date", "time", "naive", "zoned", "interval"
]
"""The kinds of Arrow types that a column of the database accepts."""

Format = Literal["json", "uuid"]

_UUID = "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"
_JSON_NUMBER = r"^[ \t\r\n]*[-0-9]"
_ESCAPED_NUL = r"(^|[^\\])(\\\\)*\\u0000"
UUID_OF_A_KEY = "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"
"""Matches UUIDs in lower case, the only accepted spelling in keys.

Two spellings of one UUID would be two keys here, and one in the database.
"""
_DECIMAL128_DIGITS_MAX = 38
_DECIMAL256_DIGITS_MAX = 76


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a database table.

    - `type_text`: its type as the database writes it.
    - `accepts`: the kind of Arrow types that it accepts, None if tidegate cannot write it.
    - `arrow`: the type in which values are sent, None for the type of the stream (a decimal without limits).
    - `may_be_missing`: whether rows may omit the column, because it is nullable, or has a default.
    - `cast`: whether values are sent as text, which the database casts to the type of the column.
    - `why_no_key`: why the column cannot be a key, None if it can.
    - `limits`: the minimum and the maximum value as integers of `arrow`, for dates and timestamps. `years`: the same
      in words.
    - `bytes_max`, `bytes_exact`: the maximum number of bytes of a value, and the number that every value must have
      because the database fills shorter ones with zeros. None without such a limit.
    - `ignores_last_spaces`: the database compares texts without the spaces at their end, so keys must not have any.
    - `drops_last_spaces`: the database returns texts without the spaces at their end, so texts must not have any.
    - `changes_numbers`: the database converts a JSON text that is a number, and may drop digits.
    - `no_nan`, `no_infinity`: the database cannot store such floats. SQLite would store a null for NaN.
    """

    name: str
    type_text: str
    accepts: Accepts | None
    arrow: pa.DataType | None
    nullable: bool
    may_be_missing: bool = False
    cast: bool = False
    format: Format | None = None
    labels: tuple[str, ...] | None = None
    characters_max: int | None = None
    limits: tuple[int, int] | None = None
    years: str = "4713 BC to 294276 for timestamps, to 5874897 for dates"
    bytes_max: int | None = None
    bytes_exact: int | None = None
    ignores_last_spaces: bool = False
    drops_last_spaces: bool = False
    changes_numbers: bool = False
    no_nan: bool = False
    no_infinity: bool = False
    why_no_key: str | None = None
    why_not: str | None = None
    """Why rows cannot write the column, for example because the database computes it. None if they can."""


@dataclass(frozen=True, slots=True)
class TableShape:
    """The columns of a table and its unique indexes."""

    columns: tuple[TableColumn, ...]
    unique: tuple[frozenset[str], ...]


def chosen_columns(where: str, place: str, shape: TableShape, schema: pa.Schema) -> tuple[TableColumn, ...]:
    """Returns the columns of the table for the columns of a stream, in the order of the stream.

    Raises ConfigurationError, which names every column that does not fit.
    """
    by_name = {column.name: column for column in shape.columns}
    wrong, chosen = [], []
    for field in schema:
        column = by_name.get(field.name)
        if column is None:
            wrong.append(f"column {field.name!r} is not in the table, which has {list(by_name)}")
            continue
        if column.why_not is not None:
            wrong.append(f"column {field.name!r} {column.why_not}: drop it from the stream")
        elif column.accepts is None:
            wrong.append(
                f"column {field.name!r}: its type {column.type_text} is not supported; write to a column of type text, "
                "or drop it from the stream"
            )
        elif (kind := kind_of(field.type)) not in _FIT[column.accepts]:
            wrong.append(
                f"column {field.name!r}: {field.type} does not fit {column.type_text}{_advice(kind, column.accepts)}"
            )
        elif column.arrow is None and pa.types.is_decimal(field.type) and field.type.scale < 0:
            wrong.append(f"column {field.name!r}: {field.type} has a negative scale; cast it")
        else:
            chosen.append(column)
    missing = [column.name for column in shape.columns if column.name not in schema.names and not column.may_be_missing]
    wrong += [
        f"column {name!r} of the table is NOT NULL without a default, and the stream lacks it" for name in missing
    ]
    if wrong:
        raise ConfigurationError(f"{where}: table {place}: {'; '.join(wrong)}")
    return tuple(chosen)


def check_keys(where: str, place: str, shape: TableShape, columns: Sequence[TableColumn], keys: Sequence[str]) -> None:
    """Raises ConfigurationError unless the keys are exactly the columns of a unique index, and can be keys."""
    by_name = {column.name: column for column in columns}
    if unknown := [name for name in keys if name not in by_name]:
        raise ConfigurationError(
            f"{where}: there is no column {unknown[0]!r} for keys; the stream has {list(by_name)}; name one of these"
        )
    if len(set(keys)) != len(keys):
        raise ConfigurationError(f"{where}: keys={list(keys)} has a column twice; name it once")
    for name in keys:
        if (reason := by_name[name].why_no_key) is not None:
            raise ConfigurationError(f"{where}: column {name!r} of table {place} cannot be a key: {reason}")
    if frozenset(keys) not in shape.unique:
        found = " or ".join(str(sorted(names)) for names in shape.unique) or "none"
        raise ConfigurationError(
            f"{where}: table {place} needs a primary key or a unique index on exactly keys={list(keys)}, without a "
            f"condition, expressions or DEFERRABLE; it has {found}. Add a unique index, or change keys="
        )


FLOAT_KEY = "equal floats may differ in their bytes (0.0 and -0.0, NaN)"


def check_new_keys(where: str, place: str, schema: pa.Schema, keys: Sequence[str]) -> None:
    """Raises ConfigurationError for keys that no table can have, before a table is created with them."""
    for name in keys:
        if name in schema.names and kind_of(schema.field(name).type) in ("float32", "float64"):
            raise ConfigurationError(f"{where}: column {name!r} of table {place} cannot be a key: {FLOAT_KEY}")


def kind_of(data_type: pa.DataType) -> str:
    """Returns the kind of an Arrow type (see `Accepts`), "nested" for nested types, "other" for other types."""
    types, found = pa.types, decoded_type(data_type)
    for kind, is_kind in _KINDS:
        if getattr(types, is_kind)(found):
            return kind
    if types.is_timestamp(found):
        return "naive" if found.tz is None else "zoned"
    return "nested" if types.is_nested(found) else "other"


_KINDS = (
    ("bool", "is_boolean"),
    ("int", "is_integer"),
    ("float32", "is_float16"),
    ("float32", "is_float32"),
    ("float64", "is_float64"),
    ("decimal", "is_decimal"),
    ("text", "is_string"),
    ("text", "is_large_string"),
    ("text", "is_string_view"),
    ("binary", "is_binary"),
    ("binary", "is_large_binary"),
    ("binary", "is_fixed_size_binary"),
    ("binary", "is_binary_view"),
    ("date", "is_date"),
    ("time", "is_time"),
    ("interval", "is_duration"),
    ("null", "is_null"),
)

_FIT: dict[Accepts, frozenset[str]] = {
    "bool": frozenset({"bool", "null"}),
    "int": frozenset({"int", "null"}),
    "float32": frozenset({"float32", "null"}),
    "float64": frozenset({"float32", "float64", "null"}),
    "decimal": frozenset({"decimal", "int", "null"}),
    "text": frozenset({"text", "null"}),
    "binary": frozenset({"binary", "null"}),
    "date": frozenset({"date", "null"}),
    "time": frozenset({"time", "null"}),
    "naive": frozenset({"naive", "null"}),
    "zoned": frozenset({"zoned", "null"}),
    "interval": frozenset({"interval", "null"}),
}


def _advice(kind: str, accepts: Accepts) -> str:
    if kind == "naive" and accepts == "zoned":
        return ": the time zone of its values is not known; cast it to a timestamp with a time zone"
    if kind == "zoned" and accepts == "naive":
        return ": the column would drop the time zone; cast it to a timestamp without one"
    if kind == "float64" and accepts in ("float32", "decimal", "int"):
        return ": digits would be lost; cast it in a step before"
    if kind == "nested":
        return "; write it as text, for example as JSON"
    return "; cast it in a step before"


def conform(batch: pa.RecordBatch, columns: Sequence[TableColumn], keys: frozenset[str], where: str) -> pa.RecordBatch:
    """Returns the batch with `columns`, cast to the types that are sent to the database. Other columns are dropped.

    Raises ConfigurationError, with column and value, for a value that the column of the table cannot store.
    """
    arrays = [_conformed(batch.column(column.name), column, column.name in keys, where) for column in columns]
    return pa.RecordBatch.from_arrays(arrays, names=[column.name for column in columns])


def sent_schema(schema: pa.Schema, columns: Sequence[TableColumn]) -> pa.Schema:
    """Returns the schema of the batches that `conform` returns for rows of `schema`."""
    return pa.schema([(column.name, sent_type(schema.field(column.name).type, column)) for column in columns])


def sent_type(given: pa.DataType, column: TableColumn) -> pa.DataType:
    """Returns the Arrow type in which values of a column are sent to the database."""
    if column.arrow is not None:
        return column.arrow
    found = decoded_type(given)
    return found if pa.types.is_decimal(found) else pa.decimal128(20, 0)


def decimal_type(precision: int, scale: int) -> pa.DataType | None:
    """Returns the Arrow decimal type with this precision and scale, or None if Arrow has none."""
    if not 0 < precision <= _DECIMAL256_DIGITS_MAX or not 0 <= scale <= precision:
        return None
    return (pa.decimal128 if precision <= _DECIMAL128_DIGITS_MAX else pa.decimal256)(precision, scale)


def _conformed(given: pa.Array, column: TableColumn, is_key: bool, where: str) -> pa.Array:
    values = plain(given)
    if values.null_count and (is_key or not column.nullable):
        what = "a null key, which no unique index finds again" if is_key else "a null, and the column is NOT NULL"
        raise ConfigurationError(f"{where}: column {column.name!r} has {what}. Filter such rows before the sink")
    wanted = sent_type(values.type, column)
    if values.type != wanted:
        values = _cast(values, wanted, column, where)
    if column.accepts == "text":
        _check_text(values, column, is_key, where)
    elif column.accepts == "binary":
        _check_bytes(values, column, where)
    elif column.limits is not None and values.null_count < len(values):
        _check_limits(values, column, where)
    if pa.types.is_floating(values.type):
        _check_floats(values, column, where)
    if pa.types.is_time(values.type) and (beyond := times_beyond_a_day(values)):
        raise ConfigurationError(f"{where}: column {column.name!r} {beyond[min(beyond)]}")
    return values


def _cast(values: pa.Array, wanted: pa.DataType, column: TableColumn, where: str) -> pa.Array:
    exact = values
    if pa.types.is_integer(values.type) and pa.types.is_decimal(wanted):
        # Arrow requires room for every integer of the type, also if the values are small.
        exact = values.cast(pa.decimal256(_DECIMAL256_DIGITS_MAX, wanted.scale))
    try:
        return exact.cast(wanted)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ConfigurationError(
            f"{where}: column {column.name!r}: {_first_unfit(exact, wanted)} does not fit {column.type_text} without a "
            "loss; change or filter such rows before the sink"
        ) from error


def _first_unfit(values: pa.Array, wanted: pa.DataType) -> str:
    """Returns the first value that cannot be cast to the type `wanted`, as text. It is found by binary search."""
    low, high = 0, len(values)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            values.slice(low, middle - low).cast(wanted)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            high = middle
        else:
            low = middle
    try:
        return value_text(values[low].as_py())
    except (OverflowError, ValueError):
        # Python has no times before the year 1 and after 9999.
        return f"a {values.type} of {values[low].value}"


def _check_text(values: pa.Array, column: TableColumn, is_key: bool, where: str) -> None:
    checks = [(pc.match_substring(values, "\0"), "contains the character NUL, which the database cannot store")]
    if column.characters_max is not None:
        long = pc.greater(pc.utf8_length(values), column.characters_max)
        checks.append((long, f"has more than {column.characters_max} characters"))
    if column.bytes_max is not None:
        long = pc.greater(pc.binary_length(values), column.bytes_max)
        checks.append((long, f"has more than {column.bytes_max:,} bytes"))
    if is_key and column.ignores_last_spaces:
        ends = pc.ends_with(values, " ")
        checks.append((ends, "ends with a space, which the database ignores in keys (use a collation with nopad)"))
    if column.drops_last_spaces:
        ends = pc.ends_with(values, " ")
        checks.append((ends, "ends with a space, which the database drops from a CHAR (change the column to VARCHAR)"))
    if column.labels is not None:
        known = pc.is_in(values, value_set=pa.array(column.labels, values.type))
        checks.append((pc.and_(pc.invert(known), pc.is_valid(values)), f"is not one of {list(column.labels)}"))
    if column.format == "uuid":
        pattern, case = (UUID_OF_A_KEY, " and small letters") if is_key else (_UUID, "")
        checks.append((pc.invert(pc.match_substring_regex(values, pattern)), f"is not a UUID with four hyphens{case}"))
    if column.format == "json":
        checks.append((_is_no_json(values), "is not valid JSON"))
        if column.type_text == "jsonb":
            checks.append((pc.match_substring_regex(values, _ESCAPED_NUL), r"has \u0000, which jsonb cannot store"))
        if column.changes_numbers:
            number = pc.match_substring_regex(values, _JSON_NUMBER)
            checks.append((number, "is a JSON number, of which the database may drop digits (use a column of TEXT)"))
    for wrong, what in checks:
        if pc.any(wrong).as_py():
            value = values.filter(pc.fill_null(wrong, False))[0].as_py()
            raise ConfigurationError(
                f"{where}: column {column.name!r} ({column.type_text}): {value_text(value)} {what}. Filter or change "
                "such rows before the sink"
            )


def _check_bytes(values: pa.Array, column: TableColumn, where: str) -> None:
    lengths = pc.binary_length(values)
    for number, test, what in ((column.bytes_max, pc.greater, "more than"), (column.bytes_exact, pc.not_equal, "not")):
        if number is not None and pc.any(wrong := test(lengths, number)).as_py():
            value = values.filter(pc.fill_null(wrong, False))[0].as_py()
            advice = "" if column.bytes_exact is None else "; the database would add zeros, so use a VARBINARY column"
            raise ConfigurationError(
                f"{where}: column {column.name!r} ({column.type_text}): {value_text(value)} has {what} {number:,} "
                f"bytes{advice}. Filter or change such rows before the sink"
            )


def _check_floats(values: pa.Array, column: TableColumn, where: str) -> None:
    for refused, test, what in ((column.no_nan, pc.is_nan, "NaN"), (column.no_infinity, pc.is_inf, "an infinity")):
        if refused and pc.any(test(values)).as_py():
            raise ConfigurationError(
                f"{where}: column {column.name!r} ({column.type_text}) has {what}, which the database cannot store. "
                "Make it null, or filter such rows, in a step before the sink"
            )


def _is_no_json(values: pa.Array) -> pa.Array:
    import polars as pl

    series = pl.Series(values)
    found = series.str.json_path_match("$").is_null() & series.is_not_null()
    # The path of the JSON value null has no match either.
    return (found & (series.str.strip_chars(" \t\r\n") != "null")).to_arrow()


def _check_limits(values: pa.Array, column: TableColumn, where: str) -> None:
    assert column.limits is not None
    numbers = values.cast(pa.int32() if pa.types.is_date32(values.type) else pa.int64())
    found = pc.min_max(numbers)
    least, greatest = found["min"].as_py(), found["max"].as_py()
    if least < column.limits[0] or greatest > column.limits[1]:
        raise ConfigurationError(
            f"{where}: column {column.name!r}: a value is outside of the range of {column.type_text} (years "
            f"{column.years}). Filter such rows before the sink"
        )
