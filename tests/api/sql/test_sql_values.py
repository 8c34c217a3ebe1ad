"""Values: what expressions of SQL are, with their types. Where Spark and polars differ it is as in Spark."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa

import tidegate as tg

ROW = pa.table(
    {
        "i": pa.array([7], pa.int64()),
        "n": pa.array([None], pa.int64()),
        "f": [2.5],
        "s": ["Abc"],
        "b": [True],
        "t": [datetime(2020, 2, 29, 13, 5, 7, 250_000)],
        "z": pa.array([datetime(2020, 1, 1)], pa.timestamp("ms", "UTC")),
        "d": [date(2020, 2, 29)],
        "dec": [Decimal("2.50")],
        "l": [[1, 2]],
        "st": [{"x": 1, "Y": "q"}],
        "cat": pa.array(["a"]).dictionary_encode(),
        "u": pa.array([3], pa.uint32()),
    }
)

NUMBERS: dict[str, tuple[Any, str]] = {
    "1 + 1": (2, "int32"),
    "i + 1": (8, "int64"),
    "i / 2": (3.5, "double"),
    "i / 0": (None, "double"),
    "f / 0": (None, "double"),
    "i % -4": (3, "int64"),
    "-i % 4": (-3, "int64"),
    "MOD(-7, 4)": (-3, "int32"),
    "i % 0": (None, "int64"),
    "-i DIV 2": (-3, "int64"),
    "n + 1": (None, "int64"),
    "u + 1": (4, "int64"),
    "0.908 * i": (Decimal("6.356"), "decimal128(24, 3)"),
    "dec * dec": (Decimal("6.2500"), "decimal128(7, 4)"),
    "dec + 1": (Decimal("3.50"), "decimal128(4, 2)"),
    "dec / 3": (Decimal("0.833333"), "decimal128(7, 6)"),
    "dec / 0": (None, "decimal128(7, 6)"),
    "dec * f": (6.25, "double"),
    "1.5": (Decimal("1.5"), "decimal128(2, 1)"),
    "-1.5e2": (-150.0, "double"),
    "10000000000": (10_000_000_000, "int64"),
    "ABS(-i)": (7, "int64"),
    "CEIL(f)": (3, "int64"),
    "FLOOR(-f)": (-3, "int64"),
    "ROUND(f)": (3.0, "double"),
    "ROUND(2.345, 2)": (Decimal("2.35"), "decimal128(4, 2)"),
    "SQRT(16)": (4.0, "double"),
    "LN(0)": (None, "double"),
    "POWER(2, 3)": (8.0, "double"),
    "GREATEST(i, n, 9)": (9, "int64"),
    "LEAST(i, f)": (2.5, "double"),
    "COALESCE(n, i)": (7, "int64"),
    "NULLIF(i, 7)": (None, "int64"),
    "NULLIF(i, n)": (7, "int64"),
    "IF(b, 1, NULL)": (1, "int32"),
    "CASE i WHEN 7 THEN 1 ELSE 2.5 END": (Decimal("1.0"), "decimal128(11, 1)"),
    "CAST(2.7 AS INT)": (2, "int32"),
    "CAST(2.345 AS DECIMAL(10, 2))": (Decimal("2.35"), "decimal128(10, 2)"),
    "CAST(-2.345 AS DECIMAL(10, 2))": (Decimal("-2.35"), "decimal128(10, 2)"),
    "CAST('12' AS INT)": (12, "int32"),
    "CAST('x' AS INT)": (None, "int32"),
    "CAST(300 AS TINYINT)": (None, "int8"),
    "CAST(i AS DECIMAL(10, 2))": (Decimal("7.00"), "decimal128(10, 2)"),
    "CAST(b AS INT)": (1, "int32"),
    "l[1]": (2, "int64"),
    "l[5]": (None, "int64"),
    "st.x": (1, "int64"),
}
CONDITIONS: dict[str, bool | None] = {
    "n = 1": None,
    "NOT (n = 1)": None,
    "n IS NULL": True,
    "n <=> NULL": True,
    "n IS DISTINCT FROM 1": True,
    "TRUE AND NULL": None,
    "FALSE AND NULL": False,
    "TRUE OR NULL": True,
    "i IN (1, 7)": True,
    "i IN (1, NULL)": None,
    "i NOT IN (1, NULL)": None,
    "i IN (n, 7)": True,
    "n IN (1)": None,
    "i BETWEEN 1 AND 7": True,
    "i = 7.0": True,
    "i > 1 AND f < 3": True,
    "b IS TRUE": True,
    "b IS NOT FALSE": True,
    "(n > 1) IS NOT TRUE": True,
    "s LIKE 'A%'": True,
    "s LIKE '_b%'": True,
    "s LIKE 'abc'": False,
    "s ILIKE 'aBC'": True,
    "s LIKE '%b%'": True,
    "s LIKE 'A!%' ESCAPE '!'": False,
    "s RLIKE '^A'": True,
    "s NOT LIKE NULL": None,
    "t > '2020-01-01'": True,
    "d = '2020-02-29'": True,
    "z > TIMESTAMP '2019-01-01 00:00:00'": True,
    "d < t": True,
    "cat = 'a'": True,
    "CAST('yes' AS BOOLEAN)": True,
    "ISNAN(f)": False,
}
TEXTS: dict[str, str | None] = {
    "'a' || s": "aAbc",
    "CONCAT(s, i)": "Abc7",
    "CONCAT(s, NULL)": None,
    "CONCAT_WS('-', s, NULL, 'x')": "Abc-x",
    "UPPER(s)": "ABC",
    "SUBSTRING(s, 2, 1)": "b",
    "SUBSTRING(s FROM 2)": "bc",
    "SUBSTRING(s, -2)": "bc",
    "SUBSTR(s, 0, 2)": "Ab",
    "LEFT(s, 2)": "Ab",
    "RIGHT(s, 2)": "bc",
    "LPAD(s, 5, '*')": "**Abc",
    "RPAD(s, 2)": "Ab",
    "REPLACE(s, 'b', '__')": "A__c",
    "REGEXP_EXTRACT(s, '(b)(c)', 2)": "c",
    "REGEXP_EXTRACT(s, 'x(y)')": "",
    "REGEXP_REPLACE(s, '[bc]+', 'x')": "Ax",
    "SPLIT_INDEX('a,b', ',', 1)": "b",
    "SPLIT_INDEX('a,b', ',', 2)": None,
    "SPLIT_PART('a,b', ',', -1)": "b",
    "TRIM('  x ')": "x",
    "TRIM(LEADING 'x' FROM 'xxa')": "a",
    "REVERSE(s)": "cbA",
    "CAST(f AS STRING)": "2.5",
    "CAST(t AS STRING)": "2020-02-29 13:05:07.25",
    "CAST(d AS STRING)": "2020-02-29",
    "DATE_FORMAT(t, 'yyyy/MM/dd HH:mm:ss.SSS')": "2020/02/29 13:05:07.250",
    "DATE_FORMAT(d, \"yyyy-MM-dd'T'HH\")": "2020-02-29T00",
    "CASE WHEN n > 1 THEN 'a' WHEN i > 1 THEN 'b' END": "b",
    "st.y": "q",
}
TIMES: dict[str, tuple[Any, str]] = {
    "YEAR(t)": (2020, "int32"),
    "EXTRACT(MINUTE FROM t)": (5, "int32"),
    "DAYOFWEEK(d)": (7, "int32"),
    "WEEKOFYEAR(d)": (9, "int32"),
    "LENGTH(s)": (3, "int32"),
    "POSITION('c' IN s)": (3, "int32"),
    "INSTR(s, 'x')": (0, "int32"),
    "DATE_TRUNC('hour', t)": (datetime(2020, 2, 29, 13), "timestamp[us]"),
    "TRUNC(d, 'month')": (date(2020, 2, 1), "date32[day]"),
    "t + INTERVAL '1' HOUR": (datetime(2020, 2, 29, 14, 5, 7, 250_000), "timestamp[us]"),
    "d + INTERVAL 1 DAY": (date(2020, 3, 1), "date32[day]"),
    "d - INTERVAL '1' MONTH": (date(2020, 1, 29), "date32[day]"),
    "d + 1": (date(2020, 3, 1), "date32[day]"),
    "DATE_ADD(d, 1)": (date(2020, 3, 1), "date32[day]"),
    "DATEDIFF(d, '2020-02-01')": (28, "int32"),
    "TIMESTAMPDIFF(MINUTE, t, t - INTERVAL '90' SECOND)": (-1, "int64"),
    "UNIX_MILLIS(z)": (1_577_836_800_000, "int64"),
    "TIMESTAMP_MILLIS(0)": (datetime(1970, 1, 1), "timestamp[ms]"),
    "CAST('2020-01-02 03:04:05' AS TIMESTAMP)": (datetime(2020, 1, 2, 3, 4, 5), "timestamp[us]"),
    "CAST(CONCAT('2020-01-0', i) AS DATE)": (date(2020, 1, 7), "date32[day]"),
    "CAST(s AS DATE)": (None, "date32[day]"),
    "CAST(t AS DATE)": (date(2020, 2, 29), "date32[day]"),
    "TO_DATE('02.01.2020', 'dd.MM.yyyy')": (date(2020, 1, 2), "date32[day]"),
    "LAST_DAY(d)": (date(2020, 2, 29), "date32[day]"),
}
ALL = {
    **NUMBERS,
    **TIMES,
    **{text: (value, "bool") for text, value in CONDITIONS.items()},
    **{text: (value, "string") for text, value in TEXTS.items()},
}


def test_expressions_have_the_values_and_types_of_spark() -> None:
    """Of one row, all in one query."""
    with tg.StreamEnvironment.local(1) as env:
        env.create_temporary_view("one", env.from_batches(ROW, splits=1))
        columns = ", ".join(f"{text} AS c{place}" for place, text in enumerate(ALL))
        rows = env.sql(f"SELECT {columns} FROM one").collect()
        assert env.execute("values").wait("1min") == "finished"
    found = rows.to_arrow()
    assert {text: (c[0].as_py(), str(c.type)) for text, c in zip(ALL, found.columns, strict=True)} == ALL
