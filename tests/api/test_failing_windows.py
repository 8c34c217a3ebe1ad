"""A window or a timer for which a function fails gives a dead letter in place of a result, exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from local_jobs import finish, local

import tidegate as tg
from tidegate.testing import Faults, simulate

NAMES = ["window_start", "window_end"]
COUNTED = {"n": int}
SPECS = [tg.Tumbling(10), tg.Sliding(20, 10), tg.Cumulating(10, 20), tg.Session(3)]


def rows(env: tg.StreamEnvironment, xs: list[int], lateness: int = 0) -> tg.Stream:
    """Rows of two keys at these moments, in their order and in batches of two."""
    data = pa.table({"k": ["a" if x % 2 else "b" for x in xs], "x": xs})
    return env.from_batches(data, timestamp="x", max_out_of_orderness=lateness, parallelism=1)


def odd_sums(table: pa.Table) -> dict[str, int]:
    """Counts a window, and fails for one that has a moment divisible by seven."""
    n = sum(table["x"].to_pylist())
    for x in table["x"].to_pylist():
        if x % 7 == 0:
            raise ValueError(f"{x} of {table.num_rows}")
    return {"n": n}


def both(made: tg.Stream, env: tg.StreamEnvironment, path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The results of a step, and its dead letters."""
    good, bad = made.collect(), made.side_output("bad").collect()
    finish(env, path)
    return good.to_arrow().to_pylist(), bad.to_arrow().to_pylist()


@pytest.mark.parametrize("spec", SPECS, ids=repr)
@pytest.mark.parametrize("keyed", [True, False])
def test_windows_that_fail_are_set_aside(tmp_path: Path, spec: Any, keyed: bool) -> None:
    """Those alone, with their keys and bounds; the others come as without them."""
    xs = [1, 2, 3, 7, 12, 13, 21, 24, 28, 41, 44]
    with local(1, 2) as env:
        stream: Any = rows(env, xs).key_by("k") if keyed else rows(env, xs)
        good, bad = both(stream.window(spec).apply(odd_sums, schema=COUNTED, errors_to="bad"), env, tmp_path / "c")
    with local(1, 2) as env:
        stream = rows(env, xs).key_by("k") if keyed else rows(env, xs)
        every = stream.window(spec).apply(lambda t: {"xs": t["x"].to_pylist()}, schema={"xs": list[int]}).collect()
        finish(env, tmp_path / "d")
    heads = ["k", *NAMES] if keyed else NAMES
    expected_good, expected_bad = [], []
    for window in every.to_arrow().to_pylist():
        head, xs = {name: window[name] for name in heads}, window["xs"]
        if first := [x for x in xs if x % 7 == 0]:
            expected_bad.append({**head, "error": f"ValueError: {first[0]} of {len(xs)}"})
        else:
            expected_good.append({**head, "n": sum(xs)})
    assert expected_good
    assert expected_bad
    assert (ordered(good), ordered(bad)) == (ordered(expected_good), ordered(expected_bad))


def ordered(found: list[dict[str, Any]]) -> list[str]:
    """Rows in an order of their own."""
    return sorted(map(repr, found))


@pytest.mark.parametrize("keyed", [True, False])
def test_windows_of_a_number_of_rows_that_fail_have_their_keys_and_the_error(tmp_path: Path, keyed: bool) -> None:
    """Their rows are gone, so the next window begins with the next row."""
    with local(1, 2) as env:
        stream: Any = rows(env, list(range(1, 13)))
        windows = (stream.key_by("k") if keyed else stream).window(tg.Count(3))
        good, bad = both(windows.apply(odd_sums, schema=COUNTED, errors_to="bad"), env, tmp_path / "c")
    if keyed:
        assert good == [{"k": "a", "n": 9}, {"k": "b", "n": 12}, {"k": "b", "n": 30}]
        assert [row["k"] for row in bad] == ["a"]
    else:
        assert [row["n"] for row in good] == [6, 15, 33]
        assert bad == [{"error": "ValueError: 7 of 3"}]


class Numbered(tg.ProcessWindowFunction):
    """Numbers the windows of a key, and fails behind that for every window with a moment divisible by seven."""

    def open(self, context: tg.ProcessWindowContext) -> None:
        self.count = context.state(tg.ValueState("count", int))
        self.seen = context.window_state(tg.ListState("seen", int))

    def process(self, rows: pa.Table, context: tg.ProcessWindowContext) -> Iterator[dict[str, int]]:
        assert context.window is not None
        self.count.update((self.count.value() or 0) + 1)
        self.seen.update(rows["x"].to_pylist())
        context.timer_service.register_event_time_timer(context.window.end_ms + 2)
        context.timer_service.register_event_time_timer(context.window.end_ms + 3)
        yield {"n": self.count.value() or 0, "rows": rows.num_rows}
        for x in rows["x"].to_pylist():
            if x % 7 == 0:
                raise ValueError(f"{x}")

    def on_timer(self, timestamp: int, context: tg.ProcessWindowContext) -> dict[str, int]:
        self.count.update((self.count.value() or 0) + 100)
        seen = list(self.seen.get())
        self.seen.add(-1)
        if timestamp % 10 == 2 and timestamp % 20 == 2:
            raise ValueError("a timer")
        return {"n": self.count.value() or 0, "rows": -len(seen)}


NUMBERED = {"n": int, "rows": int}


def test_a_call_that_fails_leaves_neither_state_nor_timers(tmp_path: Path) -> None:
    """Of keys and of windows: each result is that of a run in which the calls that failed were not made."""
    with local(1, 2) as env:
        windows = rows(env, [1, 3, 11, 13, 21, 31, 41]).key_by("k").window(tg.Tumbling(10)).allowed_lateness(5)
        good, bad = both(windows.process(Numbered(), schema=NUMBERED, errors_to="bad"), env, tmp_path / "c")
    found = [(row["window_end"], row["n"], row["rows"]) for row in good]
    assert found == [
        (10, 1, 2),
        (10, 101, -2),
        (10, 201, -3),
        (20, 202, 2),
        (20, 302, -2),
        (40, 303, 1),
        (40, 403, -1),
        (50, 404, 1),
        (50, 504, -1),
        (50, 604, -2),
    ]
    assert [(row["k"], row["window_start"], row["window_end"], row["error"]) for row in bad] == [
        ("a", 10, 20, "timer at 22: ValueError: a timer"),
        ("a", 20, 30, "ValueError: 21"),
        ("a", 30, 40, "timer at 42: ValueError: a timer"),
    ]


def test_what_cannot_be_set_aside_is_refused_with_the_program() -> None:
    """Results without known columns, a name that is taken, and a key that is called as the error."""
    env = local()
    windows = rows(env, [1]).key_by("k").window(tg.Tumbling(10))
    with pytest.raises(tg.ConfigurationError, match="apply: errors_to= needs schema="):
        windows.apply(lambda table: [{"n": 1 // table.num_rows}], errors_to="bad")
    with pytest.raises(tg.ConfigurationError, match="two side outputs are called 'late'"):
        windows.apply(odd_sums, schema=COUNTED, errors_to="late")
    named = rows(env, [1]).rename({"k": "error"}).key_by("error").window(tg.Tumbling(10))
    with pytest.raises(tg.ConfigurationError, match="already has a column 'error'"):
        named.process(Numbered(), schema=NUMBERED, errors_to="bad")


def test_results_that_do_not_fit_the_schema_fail_their_window_alone(tmp_path: Path) -> None:
    """A column that is missing, or of another type."""
    with local(1, 2) as env:
        windows = rows(env, [1, 11, 21]).key_by("k").window(tg.Tumbling(10))
        made = windows.apply(
            lambda t: {"n": 1} if t["x"][0].as_py() == 11 else {"n": "x"} if t["x"][0].as_py() == 1 else {},
            schema=COUNTED,
            errors_to="bad",
        )
        good, bad = both(made, env, tmp_path / "c")
    assert [row["window_start"] for row in good] == [10]
    assert [row["window_start"] for row in bad] == [0, 20]
    assert "without 'n'" in bad[1]["error"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_windows_that_fail_come_once_whatever_crashes(seed: int) -> None:
    """The simulator compares results and dead letters with those of an undisturbed run."""
    data = pa.table({"k": [x * 7 % 5 for x in range(240)], "x": range(240)})

    def build(env: tg.StreamEnvironment) -> None:
        keyed = env.from_batches(data, timestamp="x", parallelism=1).key_by("k")
        numbered = keyed.window(tg.Sliding(20, 10)).process(Numbered(), schema=NUMBERED, errors_to="bad", parallelism=2)
        summed = keyed.window(tg.Session(3)).apply(odd_sums, schema=COUNTED, errors_to="bad", parallelism=2)
        for name, step in (("numbered", numbered), ("summed", summed)):
            step.to_table(f"sim://{name}")
            step.side_output("bad").to_table(f"sim://{name}-bad")

    report = simulate(
        build,
        seed=seed,
        faults=Faults(crash=0.05, coordinator_crash=0.01, storage=0.03, delay="0..1s"),
        options=tg.DataPlaneOptions(source_rows_max=5),
    )
    assert report.ok, report
    assert report.crashes + report.coordinator_crashes > 0
