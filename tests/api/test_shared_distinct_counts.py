"""Distinct values of one column under several conditions: one exchange a column, and checkpoints of both forms."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, config, finish, local, numbers, rows
from old_archives import ROWS
from old_distinct_program import program

import tidegate as tg
from tidegate import recovery

ARCHIVES = sorted((Path(__file__).parent / "old_checkpoints" / "distinct").glob("*.zip"))
FORMER = {"37667d98"}
"""Commits at which each condition had a table of its own."""


def _distinct(values: pl.Expr) -> pl.Expr:
    return values.drop_nulls().n_unique().cast(pl.Int64)


def _reference(every: list[dict[str, int]]) -> dict[str, int]:
    xs = [row["x"] for row in every]
    low = len({x % 7 for x in xs if x < 30})
    return {
        "n": len(xs),
        "all": len({x % 7 for x in xs}),
        "low": low,
        "odd": len({x % 7 for x in xs if x % 2 == 1}),
        "again": low,
        "others": len({x for x in xs if x % 3 == 0}),
    }


def _check(found: dict[str, list[dict[str, Any]]]) -> None:
    """What the program gives over all rows: those from before the checkpoint, and those after it."""
    every = [{"k": x % 5, "x": x} for x in [*range(ROWS)] * 2]
    by_key = {k: [row for row in every if row["k"] == k] for k in range(5)}
    assert sorted(found["named"], key=lambda row: row["k"]) == [{"k": k, **_reference(of)} for k, of in by_key.items()]
    assert found["everything"] == [_reference(every)]
    assert sorted(found["unnamed"], key=lambda row: row["k"]) == [
        {
            "k": k,
            "all": len({row["x"] for row in of}),
            "low": len({row["x"] for row in of if row["x"] < 30}),
            "odd": len({row["x"] for row in of if row["x"] % 2 == 1}),
        }
        for k, of in by_key.items()
    ]


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.stem)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str, bool]:
    """The checkpoint root of an old job, its backend, and whether it is of the former form."""
    with zipfile.ZipFile(request.param) as archive:
        archive.extractall(tmp_path / "checkpoints")
    commit, backend = request.param.stem.split("-")
    return tmp_path / "checkpoints", backend, commit in FORMER


def test_there_are_checkpoints_of_both_forms() -> None:
    """Of both backends in the former one."""
    found = {tuple(path.stem.split("-")) for path in ARCHIVES}
    assert {backend for commit, backend in found if commit in FORMER} == {"columnar", "rocksdb"}
    assert any(commit not in FORMER for commit, _ in found)
    assert sum(path.stat().st_size for path in ARCHIVES) < 300_000


@pytest.mark.slow
def test_a_job_goes_on_from_a_checkpoint_in_its_form(old: tuple[Path, str, bool], tmp_path: Path) -> None:
    """Each value counts once, at another parallelism too, and again from the checkpoint that the job then takes."""
    root, backend, former = old
    (newest,) = recovery.list_checkpoints(str(root))
    settings = {"backend_directory": str(tmp_path / "work")} if backend == "rocksdb" else {}
    restore = newest.path
    with local(3, 7) as env:
        found = program(env, GatedSource(ROWS, ROWS))
        job = env.execute("old job", checkpoints=config(root, backend=backend, incremental=True, **settings),
                          restart=NO_RESTART, restore=restore)  # fmt: skip
        assert job.wait("300s") == "finished"
    _check({name: collected.to_arrow().to_pylist() for name, collected in found.items()})
    latest = max(recovery.list_checkpoints(str(root)), key=lambda each: each.triggered_at_ms)
    uids = {info.uid for info in recovery.inspect(latest.path).metadata.operators}
    assert latest.path != newest.path
    assert ("figures-distinct-2" in uids, "figures-values-0" in uids) == (former, not former)


@pytest.mark.slow
def test_each_column_is_exchanged_once(tmp_path: Path) -> None:
    """Two columns, nine conditions, two exchanges; the names of operators behind them are those of older versions."""
    table = numbers(400)
    x, y = tg.count_distinct("x"), tg.count_distinct(pl.col("y") * 10 // 1)
    counted = {f"x{at}": x.where(pl.col("y") < at / 4) for at in range(4)}
    counted |= {f"y{at}": y.where(pl.col("x") > 20 * at) for at in range(4)} | {"x": x}
    with local() as env:
        stream = env.from_batches(table)
        figures = stream.key_by("k").aggregate(emit="final", uid="figures", last=tg.max("x"), **counted)
        after = figures.filter(pl.col("k") >= 0)
        collected = after.collect()
        graph = env.plan("plan", checkpoints=config(tmp_path / "plan")).context.graph
        job = finish(env, tmp_path / "run")
    assert job is not None
    uids = [info.uid for info in graph.operator_infos()]
    assert [uid for uid in uids if "values" in uid] == ["figures-values-0", "figures-values-1"]
    assert any(uid.startswith("filter-12") for uid in uids), uids
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    tens = pl.col("y") * 10 // 1
    expected = frame.group_by("k").agg(
        last=pl.col("x").max(),
        **{f"x{at}": _distinct(pl.col("x").filter(pl.col("y") < at / 4)) for at in range(4)},
        **{f"y{at}": _distinct(tens.filter(pl.col("x") > 20 * at)) for at in range(4)},
        x=_distinct(pl.col("x")),
    )
    assert rows(collected.to_arrow()) == rows(expected)


def test_a_condition_may_be_called_as_a_mark(tmp_path: Path) -> None:
    """The marks of older versions keep their names; such a program has the steps that these made."""
    x, y = tg.count_distinct("x"), tg.count_distinct("y")
    figures = {"x": x, "first x": x.where("first x"), "y": y, "first y": y.where("first x")}
    table = pa.table({"k": [1, 1, 1], "x": [1, 2, 3], "y": [1, 1, 2], "first x": [True, True, None]})
    with local() as env:
        collected = env.from_batches(table).key_by("k").aggregate(emit="final", **figures).collect()
        finish(env, tmp_path / "run")
    assert collected.to_arrow().to_pylist() == [{"k": 1, "x": 3, "first x": 2, "y": 2, "first y": 1}]
