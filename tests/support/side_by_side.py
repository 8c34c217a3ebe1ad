"""The tables "Side by side" of `coming-from.md`: their lines, their input rows, and what the right side gives."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import tidegate as tg

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
NOT_THERE, ABOVE = "not there", "above: "
SET_UP = re.compile(r"```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Line:
    """A line of a table: what another engine writes, what tidegate writes, and what else is said of it."""

    engine: str
    theirs: str
    ours: str
    note: str

    @property
    def expression(self) -> str | None:
        """The expression of tidegate, or None if the line has none of its own."""
        return self.ours.strip("`") if self.ours.startswith("`") else None


def _section() -> str:
    page = PAGE.read_text()
    return page[page.index("## Side by side") :]


def lines() -> Iterator[Line]:
    """All lines of all tables, in the order of the page."""
    engine = ""
    for line in _section().splitlines():
        if line.startswith("### "):
            engine = line.removeprefix("### ")
        elif line.startswith("| `"):
            theirs, ours, note = (cell.strip() for cell in line.strip("|").split(" | "))
            yield Line(engine, theirs.strip("`"), ours, note.strip("| "))


def set_up() -> str:
    """The code that makes the streams."""
    found = SET_UP.search(_section())
    assert found is not None
    return found[1]


def data() -> tuple[Rows, Rows]:
    """The rows of the orders and of the users."""
    names = _names(tg)
    names["env"].close()
    return names["order_rows"], names["user_rows"]


def _names(module: Any) -> dict[str, Any]:
    import pyarrow as pa

    names: dict[str, Any] = {"datetime": datetime, "pa": pa, "tg": module}
    exec(set_up(), names)
    return names


def ours(expressions: Sequence[str], folder: Path) -> dict[str, Any]:
    """What expressions of tidegate give, run in one job: rows, or a list where no stream is asked for."""
    names = _names(tg)
    names["folder"] = str(folder)
    made: dict[str, Any] = {}
    for expression in dict.fromkeys(expressions):
        value = eval(expression, names)
        made[expression] = value.collect() if isinstance(value, tg.Stream) else value
    with names["env"] as env:
        env.execute("side by side").wait("15min")
        return {
            expression: value if isinstance(value, list) else settled(value.to_arrow().to_pylist())
            for expression, value in made.items()
        }


def settled(rows: Rows) -> Rows:
    """What changes come to, or the rows as they are."""
    left: Rows = []
    for row in rows:
        kind = row.pop("row_kind", None)
        left.append(row) if kind in (None, "+I", "+U") else left.remove(row)
    return left


def bag(rows: Any) -> Any:
    """Rows in any order, with repetition; other values as they are."""
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        return rows
    return Counter(str(sorted(row.items())) for row in rows)
