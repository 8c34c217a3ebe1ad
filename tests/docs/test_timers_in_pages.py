"""Functions with timers that the pages show give the same, wherever batches are cut and whenever watermarks come.

A row is processed before its own watermark. A function that deletes or moves a timer when a row comes, and so loses
what the timer would have reported, passes a test that moves the watermark by hand between any two rows. So rows are
pushed here in batches of many sizes, out of order, and compared with a model that has all rows at once.
"""

from __future__ import annotations

import ast
import itertools
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.testing import ProcessHarness

PAGES = Path(__file__).resolve().parents[2] / "docs"
MINUTE_MS = 60_000
BOUND_MS = 10 * MINUTE_MS
"""How far rows come out of order."""

Moments = list[int]


def function_of(page: str, name: str) -> tg.ProcessFunction:
    """Returns an object of the class that the examples of a page define under a name, with the page's constants."""
    namespace: dict[str, Any] = {"tg": tg, "pa": pa, "datetime": datetime, "UTC": UTC}
    text = (PAGES / page).read_text()
    for block in text.split("```python\n")[1:]:
        for statement in ast.parse(block.split("\n```")[0]).body:
            if _is_number(statement) or (isinstance(statement, ast.ClassDef) and statement.name == name):
                exec(compile(ast.Module([statement], []), page, "exec"), namespace)
    function: tg.ProcessFunction = namespace[name]()
    return function


def _is_number(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and statement.targets[0].id.endswith("_MS")
    )


def silences(moments: Moments, limit_ms: int) -> Moments:
    """The moments behind which nothing comes for this long."""
    return [at for at, following in itertools.pairwise([*moments, 1 << 62]) if following - at > limit_ms]


def model_of_silence(moments: Moments) -> list[dict[str, Any]]:
    """Each silence of a minute."""
    return [{"user": "ada", "silent_since": at} for at in silences(moments, MINUTE_MS)]


def model_of_quiet(moments: Moments) -> list[dict[str, Any]]:
    """Each quiet hour, told at its end."""
    at = [datetime.fromtimestamp(at / 1000 + 3600, UTC).replace(tzinfo=None) for at in silences(moments, 3_600_000)]
    return [{"customer": "ada", "quiet_at": each} for each in at]


def model_of_silences(moments: Moments) -> list[dict[str, Any]]:
    """The alerts and returns that a page must give for silences that have ended."""
    found = []
    for before, at in itertools.pairwise(moments):
        if at - before > 300_000:
            alert = {"kind": "silent", "at": before + 300_000, "value": float(before), "silent_ms": None}
            back = {"kind": "back", "at": at, "value": float(at), "silent_ms": at - before}
            found += [{"sensor": "ada", **alert}, {"sensor": "ada", **back}]
    return found


def model_of_sessions(moments: Moments) -> list[dict[str, Any]]:
    """Clicks until nothing comes for half an hour."""
    found, clicks = [], 0
    for at, following in itertools.pairwise([*moments, 1 << 62]):
        clicks += 1
        if following - at >= 1_800_000:
            found.append({"user": "ada", "clicks": clicks})
            clicks = 0
    return found


SHOWN = {
    "Silence": ("process-functions.md", "user", 20_000, model_of_silence),
    "Sessions": ("process-functions.md", "user", 600_000, model_of_sessions),
    "Quiet": ("tutorial.md", "customer", 1_200_000, model_of_quiet),
}
"""The page and name of each function, its key, the milliseconds between two rows (about), and its results."""


@pytest.mark.slow
@pytest.mark.parametrize("rows_of_a_batch", [1, 2, 7, 200])
@pytest.mark.parametrize("name", SHOWN)
def test_a_function_of_a_page_gives_what_all_rows_give(name: str, rows_of_a_batch: int) -> None:
    """Rows come up to ten minutes out of order, and the watermark moves between batches alone."""
    page, key, step_ms, model = SHOWN[name]
    rng = random.Random(name)
    steps = [rng.choice([step_ms // 3, step_ms, 2 * step_ms, 10 * step_ms]) + rng.randrange(1000) for _ in range(200)]
    moments = list(itertools.accumulate(steps))
    assert results(name, page, key, moments, rows_of_a_batch, rng) == model(moments)


@pytest.mark.slow
@pytest.mark.parametrize("rows_of_a_batch", [1, 7, 200])
def test_the_function_of_rows_in_order_gives_what_all_rows_give(rows_of_a_batch: int) -> None:
    """In a job, which sorts the rows, and fires timers between them."""
    rng = random.Random(rows_of_a_batch)
    steps = [rng.choice([33_000, 100_000, 200_000, 1_000_000]) + rng.randrange(1000) for _ in range(200)]
    moments = list(itertools.accumulate(steps))
    arriving = sorted(moments, key=lambda at: at + rng.randrange(BOUND_MS))
    readings = pa.table({"sensor": ["ada"] * len(arriving), "at": arriving, "value": [float(at) for at in arriving]})
    schema = {"sensor": str, "kind": str, "at": int, "value": float, "silent_ms": int}
    options = tg.DataPlaneOptions(source_rows_max=rows_of_a_batch)
    with tg.StreamEnvironment.local(1, options=options) as env:
        stream = env.from_batches(readings, timestamp="at", max_out_of_orderness=BOUND_MS).key_by("sensor")
        silences = stream.process(function_of("process-functions.md", "Silences"), schema=schema, in_order=True)
        found = silences.collect()
        assert env.execute("silences").wait("4min") == "finished"
        assert found.to_arrow().to_pylist() == model_of_silences(moments)


def results(
    name: str, page: str, key: str, moments: Moments, rows_of_a_batch: int, rng: random.Random
) -> list[dict[str, Any]]:
    """Runs a function of a page on rows out of order, in batches of this size. Returns its results."""
    function = function_of(page, name)
    arriving = sorted(moments, key=lambda at: at + rng.randrange(BOUND_MS))
    tags = [tg.OutputTag("late", pa.schema({key: pa.string(), "at": pa.int64(), "value": pa.float64()}))]
    with ProcessHarness(function, key=key, event_time="at", side_outputs=tags) as harness:
        newest = 0
        for batch in (arriving[start : start + rows_of_a_batch] for start in range(0, len(arriving), rows_of_a_batch)):
            harness.push(*({key: "ada", "at": at, "value": float(at)} for at in batch))
            newest = max(newest, *batch)
            harness.advance_watermark(newest - BOUND_MS - 1)
        harness.end()
        assert harness.side_output("late") == []
        return harness.output
