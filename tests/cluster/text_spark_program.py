"""A program that reads files of text with Spark itself, in a process of its own with one local session.

`python text_spark_program.py CASES` reads a JSON file with a list of objects, each with `name`, `format`, `path`,
`options` and `columns` (name and Spark's type). It writes one JSON object to `CASES.out`. For each name it has
`fails`, whether mode FAILFAST refuses the file, and `rows`, which mode DROPMALFORMED keeps, in plain values.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tidegate.spark_bridge import spark_session

_PLAIN = {
    "date": "unix_date({})",
    "timestamp": "unix_micros({})",
    "timestamp_ntz": "unix_micros(cast({} as timestamp))",
    "binary": "hex({})",
}
"""Values that Python cannot hold for all years, or JSON not at all, as numbers and strings."""


def plain(value: Any) -> Any:
    """A value of a row as JSON has it."""
    if hasattr(value, "asDict"):
        return {name: plain(each) for name, each in value.asDict().items()}
    if isinstance(value, bytearray):
        return value.hex().upper()
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def answer(spark: Any, case: dict[str, Any]) -> dict[str, object]:
    """What Spark makes of one file."""
    schema = ", ".join(f"`{name}` {kind}" for name, kind in case["columns"])
    shown = [f"{_PLAIN.get(kind, '{}').format(f'`{name}`')} as `{name}`" for name, kind in case["columns"]]

    def rows(mode: str) -> list[list[Any]]:
        reader = spark.read.schema(schema).options(**case["options"]).option("mode", mode)
        found = reader.format(case["format"]).load(case["path"]).selectExpr(*shown).collect()
        return [[plain(value) for value in row] for row in found]

    try:
        return {"fails": False, "rows": rows("FAILFAST")}
    except Exception as error:  # noqa: BLE001 - each kind is an answer, and is shown where it is not expected
        text = str(error)[:500]
    try:
        return {"fails": True, "error": text, "rows": rows("DROPMALFORMED")}
    except Exception as error:  # noqa: BLE001 - a file of which Spark reads nothing
        return {"fails": True, "error": str(error)[:500], "rows": []}


def main(cases: Path) -> None:
    """Read all files, one after the other."""
    settings = {
        "spark.master": "local[1]",
        "spark.ui.enabled": "false",
        "spark.driver.memory": "1g",
        "spark.sql.session.timeZone": "UTC",
        # By default Spark refuses whole files with dates that its versions before 3.0 have read in another way.
        "spark.sql.legacy.timeParserPolicy": "CORRECTED",
    }
    spark = spark_session("text", settings)
    found = {case["name"]: answer(spark, case) for case in json.loads(cases.read_text())}
    cases.with_name(f"{cases.name}.out").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
