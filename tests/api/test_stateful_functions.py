"""One function with one state: `stateful_map`, `reduce` and `map_groups`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypedDict

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, config, local, opening

import tidegate as tg

ROWS = [{"k": "a", "n": 1}, {"k": "b", "n": 5}, {"k": "a", "n": 2}, {"k": "a", "n": 3}]


class Total(TypedDict):
    k: str
    total: int


@dataclasses.dataclass
class Mean:
    rows: int
    total: float


def _running(total: int | None, row: Any) -> tuple[int | None, Total]:
    total = (total or 0) + row["n"]
    return total, {"k": row["k"], "total": total}


def _mean(state: Mean | None, row: Any) -> tuple[Mean, dict[str, Any]]:
    state = Mean(0, 0.0) if state is None else state
    state.rows += 1
    state.total += row["n"]
    return state, {"k": row["k"], "mean": state.total / state.rows}


def _collected(step: Any, rows: Any = ROWS) -> list[dict[str, Any]]:
    with local(2, 2) as env:
        found = step(env.from_rows(rows).key_by("k")).collect()
        env.execute("functions", restart=NO_RESTART).wait()
        return sorted(found.to_arrow().to_pylist(), key=lambda row: row["k"])


def test_a_state_and_a_row() -> None:
    """In the order of the rows of a key; types come from the annotation or from schema=."""
    assert _collected(lambda s: s.stateful_map(_running, state=int)) == [
        {"k": "a", "total": 1},
        {"k": "a", "total": 3},
        {"k": "a", "total": 6},
        {"k": "b", "total": 5},
    ]
    means = _collected(lambda s: s.stateful_map(_mean, state=Mean, schema={"k": str, "mean": float}))
    assert [row["mean"] for row in means] == [1.0, 1.5, 2.0, 5.0]


def test_none_clears_the_state() -> None:
    """The next row of the key begins anew."""

    def every_second(seen: int | None, row: Any) -> tuple[int | None, Total]:
        return (None if seen else 1), {"k": row["k"], "total": seen or 0}

    found = _collected(lambda s: s.stateful_map(every_second, state=int), [{"k": "a"}] * 4)
    assert [row["total"] for row in found] == [0, 1, 0, 1]


def test_rows_are_reduced() -> None:
    """Each row gives a result; the first of a key is its own."""
    found = _collected(lambda s: s.reduce(lambda before, row: {**row, "n": before["n"] + row["n"]}))
    assert found == [{"k": "a", "n": 1}, {"k": "a", "n": 3}, {"k": "a", "n": 6}, {"k": "b", "n": 5}]


def test_groups_come_once_at_the_end() -> None:
    """All rows of a key, as a table."""

    def summary(rows: pa.Table) -> Total:
        return {"k": rows["k"][0].as_py(), "total": sum(rows["n"].to_pylist())}

    assert _collected(lambda s: s.map_groups(summary)) == [{"k": "a", "total": 6}, {"k": "b", "total": 5}]
    same = _collected(lambda s: s.map_groups(lambda rows: rows, schema={"k": str, "n": int}))
    assert sorted(row["n"] for row in same) == [1, 2, 3, 5]
    frames = _collected(lambda s: s.map_groups(lambda rows: pl.from_arrow(rows), schema={"k": str, "n": int}))
    assert sorted(row["n"] for row in frames) == [1, 2, 3, 5]


def test_a_frame_of_another_library_is_refused() -> None:
    """The error says what a function may return, and names no moment for the end of the input."""
    with pytest.raises(tg.JobFailedError, match="returned a pandas DataFrame; return a pyarrow Table, a pol") as raised:
        _collected(lambda s: s.map_groups(lambda rows: rows.to_pandas(), schema={"k": str, "n": int}))
    assert "timer at the end of the input of key" in str(raised.value)
    assert str(2**63 - 1) not in str(raised.value)


def test_a_function_that_returns_no_pair_fails_the_job() -> None:
    """The error says what it returned."""
    with pytest.raises(tg.JobFailedError, match="returned dict; return a tuple of two values, the new state"):
        _collected(lambda s: s.stateful_map(lambda state, row: row, state=int, schema={"k": str, "n": int}))


def test_rows_that_fail_are_set_aside_and_leave_no_state() -> None:
    """Of stateful_map and reduce those rows, also if the function has changed its state; of map_groups whole keys."""

    def running(state: Any, row: Any) -> tuple[Any, Any]:
        state = state or []
        state.append(row["n"])
        return state, {"k": row["k"], "total": 6 // (row["n"] - 2) * 0 + sum(state)}

    def reduced(before: Any, row: Any) -> Any:
        before["n"] += row["n"]
        return before if row["n"] != 2 else {"k": before["k"]}

    def summary(rows: pa.Table) -> Total:
        return {"k": rows["k"][0].as_py(), "total": 6 // (rows.num_rows - 1)}

    types = {"k": str, "total": int}

    def aside(made: Any) -> Any:
        return made.side_output("bad").select("k", "error", "n")

    def maps(s: Any) -> Any:
        return s.stateful_map(running, state=list[int], schema=types, errors_to="bad")

    def reduces(s: Any) -> Any:
        return s.reduce(reduced, errors_to="bad")

    def groups(s: Any) -> Any:
        return s.map_groups(summary, errors_to="bad")

    assert [row["total"] for row in _collected(maps)] == [1, 4, 5]
    assert [row["n"] for row in _collected(reduces)] == [1, 4, 5]
    assert _collected(groups) == [{"k": "a", "total": 3}]
    divided = "ZeroDivisionError: integer division or modulo by zero"
    assert _collected(lambda s: aside(maps(s))) == [{"k": "a", "n": 2, "error": divided}]
    (bad,) = _collected(lambda s: aside(reduces(s)))
    assert (bad["k"], bad["n"]) == ("a", 2)
    assert "returned a row without 'n'" in bad["error"]
    (bad,) = _collected(lambda s: aside(groups(s)))
    assert (bad["k"], bad["n"]) == ("b", None)
    assert bad["error"] == f"timer at the end of the input: {divided}"


def test_a_reduce_without_a_result_is_refused_as_a_row() -> None:
    """The error was that None is not iterable."""
    with pytest.raises(tg.JobFailedError, match="a row must be a dict, not NoneType: None"):
        _collected(lambda s: s.reduce(lambda before, row: None))


@pytest.mark.slow
def test_states_of_functions_are_restored(tmp_path: Path) -> None:
    """From a savepoint in the middle: the results are those of one run."""
    paths: list[str] = []
    found: dict[str, list[Any]] = {}
    for restore in (False, True):
        with opening(GatedSource(60, gates=() if restore else (37,))) as source, local(1, 5) as env:
            keyed = env.from_source(source, uid="in").key_by("k")
            steps = {
                "map": keyed.stateful_map(
                    lambda n, row: ((n or 0) + 1, {"k": row["k"], "n": (n or 0) + 1}),
                    state=int,
                    schema={"k": int, "n": int},
                    uid="map",
                ),
                "reduce": keyed.reduce(lambda before, row: {**row, "x": before["x"] + row["x"]}, uid="reduce"),
                "groups": keyed.map_groups(
                    lambda rows: {"k": rows["k"][0].as_py(), "n": rows.num_rows},
                    schema={"k": int, "n": int},
                    uid="groups",
                ),
            }
            collected = {name: step.collect(uid=f"out {name}") for name, step in steps.items()}
            job = env.execute(
                "functions",
                checkpoints=config(tmp_path / "c"),
                restart=NO_RESTART,
                restore=paths[0] if restore else None,
            )
            if not restore:
                source.await_gate(37)
                paths.append(job.stop(savepoint=str(tmp_path / "savepoint")))
            else:
                assert job.wait("4min") == "finished"
                found = {name: rows.to_arrow().to_pylist() for name, rows in collected.items()}
    keys = {row["k"] for row in found["groups"]}
    assert sum(row["n"] for row in found["groups"]) == 60
    for key in keys:
        assert max(row["n"] for row in found["map"] if row["k"] == key) == next(
            row["n"] for row in found["groups"] if row["k"] == key
        )
    assert sum(max(row["x"] for row in found["reduce"] if row["k"] == key) for key in keys) == sum(range(60))
