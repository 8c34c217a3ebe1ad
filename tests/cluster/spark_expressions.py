"""Expressions of SQL that tidegate and Spark calculate alike, and the rows over which they are compared."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from itertools import product

import pyarrow as pa

ROWS = pa.table(
    {
        "a": pa.array([1, -7, 0, None, 12, 3, 2_000_000_000], pa.int64()),
        "b": pa.array([3, 2, 0, 5, None, -4, 1_000], pa.int64()),
        "i": pa.array([1, 2, -3, None, 0, 31, 100], pa.int32()),
        "x": pa.array([0.5, -2.25, 0.0, None, 1e3, 7.0, 2.5], pa.float64()),
        "y": pa.array([2.0, None, 0.0, 0.25, -1.5, 3.0, 10.0], pa.float64()),
        "m": pa.array(
            [
                Decimal("1.25"),
                Decimal("-3.55"),
                None,
                Decimal("0.00"),
                Decimal("9.99"),
                Decimal("7.50"),
                Decimal("100.01"),
            ],
            pa.decimal128(7, 2),
        ),
        "s": pa.array(["abc", "", None, "Ab cd", "a%b", "xyz", "12"]),
        "t": pa.array(["b", "a", "c", None, "%", "xyz", "1"]),
        "p": pa.array([True, False, None, True, False, None, True]),
        "q": pa.array([True, True, True, None, False, None, False]),
        "d": pa.array(
            [
                date(2024, 2, 29),
                date(1999, 12, 31),
                None,
                date(2000, 1, 1),
                date(2023, 7, 15),
                date(1970, 1, 1),
                date(2024, 12, 30),
            ]
        ),
        "ts": pa.array(
            [
                datetime(2024, 2, 29, 23, 59, 58, 250_000),
                datetime(1999, 12, 31, 0, 0),
                None,
                datetime(2000, 1, 1, 12, 30),
                datetime(2023, 7, 15, 8, 0, 1),
                datetime(1970, 1, 1),
                datetime(2024, 12, 30, 6, 7, 8),
            ],
            pa.timestamp("us"),
        ),
    }
)

_OF_NUMBERS = (
    "{0} + {1}",
    "{0} - {1}",
    "{0} * {1}",
    "{0} / {1}",
    "{0} % {1}",
    "{0} = {1}",
    "{0} <> {1}",
    "{0} < {1}",
    "{0} >= {1}",
    "{0} <=> {1}",
    "COALESCE({0}, {1})",
    "NULLIF({0}, {1})",
    "GREATEST({0}, {1})",
    "LEAST({0}, {1})",
    "{0} BETWEEN {1} AND 5",
    "{0} IN ({1}, 1, NULL)",
    "CASE WHEN {0} > {1} THEN {0} ELSE {1} END",
    "IF({0} < {1}, {0}, {1})",
    "NVL2({0}, {1}, {0})",
    "{0} IS DISTINCT FROM {1}",
)
_OF_NUMBER = (
    "-{0}",
    "ABS({0})",
    "SIGN({0})",
    "CEIL({0})",
    "FLOOR({0})",
    "{0} IS NULL",
    "CAST({0} AS INT)",
    "CAST({0} AS BIGINT)",
    "CAST({0} AS DOUBLE)",
    "CAST({0} AS DECIMAL(12,3))",
    "CAST({0} AS BOOLEAN)",
    "{0} * 2 + 1",
    "{0} > 0 AND {0} < 10",
    "NOT ({0} > 1)",
    "MOD({0}, 3)",
    "ROUND({0}, 1)",
)
_OF_FLOAT = (
    "SQRT(ABS({0}))",
    "EXP({0} / 1000)",
    "POWER({0}, 2)",
    "SIN({0})",
    "COS({0})",
    "ATAN({0})",
    "RADIANS({0})",
    "DEGREES({0})",
    "LN(ABS({0}) + 1)",
    "LOG10(ABS({0}) + 1)",
    "LOG2(ABS({0}) + 1)",
    "ISNAN({0})",
    "ATAN2({0}, 2)",
)
_OF_TEXT = (
    "UPPER({0})",
    "LOWER({0})",
    "LENGTH({0})",
    "TRIM({0})",
    "LTRIM({0})",
    "RTRIM({0})",
    "REVERSE({0})",
    "SUBSTRING({0}, 2)",
    "SUBSTRING({0}, 2, 2)",
    "SUBSTRING({0}, -2, 2)",
    "LEFT({0}, 2)",
    "RIGHT({0}, 2)",
    "LPAD({0}, 4, '*')",
    "RPAD({0}, 4, '*')",
    "REPLACE({0}, 'a', 'zz')",
    "{0} LIKE 'a%'",
    "{0} LIKE '%b'",
    "{0} LIKE '_b%'",
    "{0} ILIKE 'A%'",
    "{0} RLIKE '^[a-c]+'",
    "REGEXP_REPLACE({0}, '[ab]', '-')",
    "REGEXP_EXTRACT({0}, '([a-z])(.)', 2)",
    "INSTR({0}, 'b')",
    "SPLIT_PART({0}, 'b', 1)",
    "CAST({0} AS INT)",
    "CAST({0} AS DOUBLE)",
    "CONCAT({0}, '-', {0})",
    "{0} || 'x'",
    "{0} IS NOT NULL",
    "COALESCE({0}, '?')",
    "{0} IN ('abc', 'b')",
)
_OF_TEXTS = (
    "{0} || {1}",
    "CONCAT_WS('-', {0}, {1})",
    "{0} = {1}",
    "{0} < {1}",
    "STARTSWITH({0}, {1})",
    "ENDSWITH({0}, {1})",
    "CONTAINS({0}, {1})",
    "NULLIF({0}, {1})",
    "GREATEST({0}, {1})",
)
_OF_FLAGS = (
    "{0} AND {1}",
    "{0} OR {1}",
    "NOT {0}",
    "{0} = {1}",
    "{0} <=> {1}",
    "CASE WHEN {0} THEN 1 WHEN {1} THEN 2 END",
    "IF({0}, 'y', 'n')",
    "CAST({0} AS INT)",
    "COALESCE({0}, {1}, FALSE)",
)
_OF_DAY = (
    "YEAR({0})",
    "QUARTER({0})",
    "MONTH({0})",
    "DAY({0})",
    "DAYOFWEEK({0})",
    "DAYOFYEAR({0})",
    "WEEKOFYEAR({0})",
    "LAST_DAY({0})",
    "DATE_ADD({0}, 3)",
    "DATE_SUB({0}, 3)",
    "ADD_MONTHS({0}, 1)",
    "TRUNC({0}, 'MONTH')",
    "TRUNC({0}, 'YEAR')",
    "{0} > '2000-01-01'",
    "{0} + INTERVAL '1' DAY",
    "EXTRACT(YEAR FROM {0})",
    "CAST({0} AS STRING)",
    "DATEDIFF({0}, DATE '2000-01-01')",
    "DATE_FORMAT({0}, 'yyyy-MM-dd')",
)
_OF_MOMENT = (
    "HOUR({0})",
    "MINUTE({0})",
    "SECOND({0})",
    "DATE_TRUNC('HOUR', {0})",
    "DATE_TRUNC('MONTH', {0})",
    "CAST({0} AS DATE)",
    "{0} + INTERVAL '90' MINUTES",
    "{0} - INTERVAL '1' DAY",
    "UNIX_MILLIS({0})",
    "UNIX_SECONDS({0})",
    "DATE_FORMAT({0}, 'HH:mm:ss')",
    "{0} BETWEEN '2000-01-01' AND '2024-01-01 00:00:00'",
)
_ALONE = (
    "POSITION('b' IN s)",
    "LOCATE('b', s)",
    "i DIV 2",
    "a DIV b",
    "a % i",
    "TO_DATE('2024-03-05')",
    "TO_TIMESTAMP('2024-03-05 01:02:03')",
    "TIMESTAMP_MILLIS(a)",
    "PI()",
    "1.5 + a",
    "m + 1.5",
    "m * m",
    "m / 3",
    "x > m",
    "1 / 0",
    "7 DIV 0",
    "CAST('1.25' AS DECIMAL(4,1))",
    "CAST(1.25 AS DECIMAL(4,1))",
    "ROUND(2.5)",
    "ROUND(x)",
    "CAST(p AS STRING)",
    "CAST(a AS STRING)",
    "NULL = NULL",
    "NULL IS NULL",
    "d < ts",
    "DATEDIFF(d, ts)",
)


def expressions() -> list[str]:
    """All of them, each once."""
    return list(dict.fromkeys(_made()))


def _made() -> Iterator[str]:
    yield from (
        form.format(*pair)
        for form in _OF_NUMBERS
        for pair in (("a", "b"), ("i", "a"), ("x", "y"), ("m", "a"), ("m", "x"))
    )
    for forms, columns in (
        (_OF_NUMBER, "aixm"),
        (_OF_FLOAT, "xy"),
        (_OF_TEXT, "st"),
    ):
        yield from (form.format(column) for form, column in product(forms, columns))
    yield from (form.format("s", "t") for form in _OF_TEXTS)
    yield from (form.format(*pair) for form in _OF_FLAGS for pair in (("p", "q"), ("q", "p")))
    yield from (form.format(column) for form in _OF_DAY for column in ("d", "ts"))
    yield from (form.format("ts") for form in _OF_MOMENT)
    yield from _ALONE
