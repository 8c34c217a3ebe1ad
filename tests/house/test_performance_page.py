"""The page of performance: that of the newest results, with what has become worse."""

from __future__ import annotations

import json

import pytest
from performance_page import Results, Suite, page, regressions
from repository import ROOT

FLOOR = "floor: a loop"


def _results(name: str, rate: float, floor: float, kind: str = "a machine") -> Results:
    suite = Suite("x.py", "X", "python x.py", "rows a second", True, {FLOOR: floor, "map": rate}, (FLOOR,), "", 0.0)
    return Results(name, {"kind": kind, "python": "3.11"}, [suite])


def test_the_page_is_that_of_the_newest_results() -> None:
    """`python benchmarks/bench_all.py --page` makes it; each name of a file is its date."""
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    results = [Results.of(path.stem, json.loads(path.read_text())) for path in files]
    assert (ROOT / "docs" / "performance.md").read_text() == page(results)


@pytest.mark.parametrize(
    ("earlier", "now", "worse"),
    [
        ((100.0, 200.0), (84.0, 200.0), True),
        ((100.0, 200.0), (86.0, 200.0), False),
        ((100.0, 200.0), (50.0, 100.0), False),
        ((100.0, 200.0), (100.0, 300.0), True),
    ],
)
def test_what_is_worse_is_named(earlier: tuple[float, float], now: tuple[float, float], worse: bool) -> None:
    """By more than 15 %, measured by the floor of the same run: a machine that is slower as a whole is none."""
    before, after = _results("2026-01-01", *earlier), _results("2026-02-01", *now)
    found = list(regressions(after, [before]))
    assert [line.split(":")[0] for line in found] == (["x.py, map"] if worse else [])
    assert (found[0] in page([before, after])) if worse else "No figure is more than 15%" in page([before, after])


def test_another_machine_is_not_compared_with() -> None:
    """Nor is a command with other arguments; the newest file that has the figure counts."""
    now = _results("2026-03-01", 50.0, 200.0)
    assert list(regressions(now, [_results("2026-01-01", 100.0, 200.0, "another")])) == []
    assert list(regressions(now, [_results("2026-01-01", 100.0, 200.0), _results("2026-02-01", 51.0, 200.0)])) == []
    assert "There is no earlier file of such a machine." in page([now])


def test_lower_may_be_better() -> None:
    """Of nanoseconds a row fewer are better."""
    suite = Suite("x.py", "X", "python x.py", "ns", False, {"map": 10.0}, (), "", 0.0)
    slower = Suite("x.py", "X", "python x.py", "ns", False, {"map": 12.0}, (), "", 0.0)
    machine = {"kind": "a machine", "python": "3.11"}
    assert list(regressions(Results("2", machine, [suite]), [Results("1", machine, [slower])])) == []
    assert len(list(regressions(Results("2", machine, [slower]), [Results("1", machine, [suite])]))) == 1


def test_a_yardstick_may_be_that_of_one_figure() -> None:
    """It is a column of the page, not a line, and a floor of its own counts out the machine for that figure alone."""

    def results(name: str, rate: float, floor: float) -> Results:
        figures = {"q0": rate, "q0, floor": floor, "q0, Spark": 50.0, "q1": 10.0}
        suite = Suite("x.py", "X", "python x.py", "rows a second", True, figures, ("floor", "Spark"), "", 0.0)
        return Results(name, {"kind": "a machine", "python": "3.11"}, [suite])

    before, slower = results("1", 100.0, 200.0), results("2", 50.0, 100.0)
    assert list(regressions(slower, [before])) == []
    assert [line.split(":")[0] for line in regressions(results("2", 100.0, 300.0), [before])] == ["x.py, q0"]
    lines = page([before]).splitlines()
    assert "| q0 | 100.0 | 0.50 | 2.00 |  |" in lines
    assert "| q1 | 10.0 |  |  |  |" in lines
    assert not any(line.startswith("| q0, ") for line in lines)
