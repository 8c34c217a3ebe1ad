"""Programs that change between a savepoint and its restore: what evolves is right, and all else is refused at once."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from command_line import CommandRunner
from local_jobs import NO_RESTART, GatedSource, config, local, opening

import tidegate as tg
from tidegate.cli.main import app

ROWS, GATE = 60, 37
Step = Callable[[Any], Any]


def _rows(env: tg.StreamEnvironment, source: GatedSource) -> Any:
    """Rows with a key, a time and two numbers."""
    stream = env.from_source(source, uid="in")
    columns = stream.with_columns(t=pl.col("x") * 100, v=(pl.col("x") * 7) % 11, f=pl.col("x") / 4, uid="columns")
    return columns.assign_timestamps("t", uid="times")


def _run(
    folder: Path, step: Step, *, restore: str | None, allow: bool = False, backend: str = "columnar"
) -> tuple[str | None, list[dict[str, Any]]]:
    """Run a program until its savepoint at the gate; or from a savepoint to its end. Returns its path, or its rows."""
    gates = (GATE,) if restore is None else ()
    with opening(GatedSource(ROWS, gates=gates)) as source, local(1, 5) as env:
        made = step(_rows(env, source)).collect(uid="out" if restore is None else "out again")
        job = env.execute(
            "changing",
            checkpoints=config(folder / "checkpoints", backend=backend),
            restart=NO_RESTART,
            restore=restore,
            allow_non_restored_state=allow,
        )
        if restore is None:
            source.await_gate(GATE)
            return job.stop(savepoint=str(folder / "savepoint")), []
        assert job.wait("4min") == "finished"
        return None, made.to_arrow().to_pylist()


def _refusal(folder: Path, step: Step, path: str, allow: bool = True) -> str:
    """The error of a program that cannot go on from a savepoint."""
    before = sorted(str(found) for found in folder.rglob("*"))
    with local(1, 5) as env:
        step(_rows(env, GatedSource(ROWS))).collect(uid="out again")
        with pytest.raises(tg.IncompatibleStateError) as refused:
            env.execute(
                "changing", checkpoints=config(folder / "checkpoints"), restore=path, allow_non_restored_state=allow
            )
    assert before == sorted(str(found) for found in folder.rglob("*")), "a refusal has changed something"
    return str(refused.value)


def _keyed(stream: Any) -> Any:
    return stream.key_by("k")


def _by(divisor: int, stream: Any) -> Any:
    """By a key that an expression computes, under the same name."""
    return stream.key_by((pl.col("x") % divisor).alias("part"))


def _aggregate(**aggregates: tg.Aggregate) -> Step:
    return lambda stream: _keyed(stream).aggregate(**aggregates, emit="final", uid="op")


def _window(spec: Any, lateness: str | None = None, **aggregates: tg.Aggregate) -> Step:
    def made(stream: Any) -> Any:
        windows = _keyed(stream).window(spec)
        windows = windows if lateness is None else windows.allowed_lateness(lateness)
        return windows.aggregate(**aggregates, uid="op")

    return made


def _apply(spec: Any) -> Step:
    schema = pa.schema({"n": pa.int64()})
    return lambda stream: _keyed(stream).window(spec).apply(lambda rows: {"n": rows.num_rows}, schema=schema, uid="op")


def _window_top(spec: Any, n: int = 2, descending: bool = True) -> Step:
    return lambda stream: _keyed(stream).window(spec).top_n(n, by="v", descending=descending, uid="op")


def _top(n: int = 2, by: str = "v", descending: bool = True, **more: Any) -> Step:
    return lambda stream: _keyed(stream).top_n(n, by=by, descending=descending, uid="op", **more)


def _dedup(*by: str, **more: Any) -> Step:
    return lambda stream: _keyed(stream).deduplicate(*by, uid="op", **more)


def _right(stream: Any) -> Any:
    return stream.select("k", "t", w="v", uid="right")


def _join(**more: Any) -> Step:
    return lambda stream: stream.join(_right(stream), on="k", uid="op", **more)


def _interval(between: tuple[int, int], how: Any = "inner") -> Step:
    return lambda stream: stream.interval_join(_right(stream), on="k", between=between, how=how, uid="op")


def _latest(**more: Any) -> Step:
    return lambda stream: stream.join_latest(_right(stream), on="k", uid="op", **more)


def _asof(how: Any = "left") -> Step:
    return lambda stream: stream.join_asof(_right(stream), on="k", how=how, uid="op")


def _updates(ttl: str | None = None, ttl_time: Any = "event") -> Step:
    more = {} if ttl is None else {"ttl": ttl, "ttl_time": ttl_time}
    return lambda stream: _keyed(stream).aggregate(n=tg.count(), uid="op", **more)


PROGRAMS: Mapping[str, Step] = {
    "sum v": _aggregate(x=tg.sum("v")),
    "sum t": _aggregate(x=tg.sum("t")),
    "max v": _aggregate(x=tg.max("v")),
    "min v": _aggregate(x=tg.min("v")),
    "count": _aggregate(x=tg.count()),
    "sum v where": _aggregate(x=tg.sum("v").where(pl.col("v") > 3)),
    "sum 2v": _aggregate(x=tg.sum(pl.col("v") * 2)),
    "first": _aggregate(x=tg.first("v")),
    "last": _aggregate(x=tg.last("v")),
    "first by t": _aggregate(x=tg.first("v", by="t")),
    "distinct": _aggregate(x=tg.count_distinct("v")),
    "distinct where": _aggregate(x=tg.count_distinct("v").where(pl.col("v") > 3)),
    "list of 3": _aggregate(x=tg.collect_list("v", limit=3)),
    "list of 4": _aggregate(x=tg.collect_list("v", limit=4)),
    "by another key": lambda stream: stream.key_by("v").aggregate(x=tg.sum("v"), emit="final", uid="op"),
    "by a key modulo 2": lambda stream: _by(2, stream).aggregate(x=tg.sum("v"), emit="final", uid="op"),
    "by a key modulo 3": lambda stream: _by(3, stream).aggregate(x=tg.sum("v"), emit="final", uid="op"),
    "by a key modulo 2, twice v": lambda stream: _by(2, stream).aggregate(
        x=tg.sum(pl.col("v") * 2), emit="final", uid="op"
    ),
    "by a key modulo 3, twice v": lambda stream: _by(3, stream).aggregate(
        x=tg.sum(pl.col("v") * 2), emit="final", uid="op"
    ),
    "top 2 by a key modulo 2": lambda stream: _by(2, stream).top_n(2, by="v", uid="op"),
    "top 2 by a key modulo 3": lambda stream: _by(3, stream).top_n(2, by="v", uid="op"),
    "updates": _updates(),
    "updates for a while": _updates("1h"),
    "updates for longer": _updates("2h"),
    "updates by the clock": _updates("1h", "processing"),
    "changes": lambda stream: _keyed(stream).aggregate(n=tg.count(), emit="changes", uid="op"),
    "tumbling 1 s": _window(tg.Tumbling("1s"), x=tg.sum("v")),
    "tumbling 1.5 s": _window(tg.Tumbling("1500ms"), x=tg.sum("v")),
    "tumbling with an offset": _window(tg.Tumbling("1s", offset="300ms"), x=tg.sum("v")),
    "tumbling with lateness": _window(tg.Tumbling("1s"), "1s", x=tg.sum("v")),
    "tumbling days in a zone": _window(tg.Tumbling("1d", timezone="Europe/Berlin"), x=tg.sum("v")),
    "sliding": _window(tg.Sliding("1s", "500ms"), x=tg.sum("v")),
    "sliding wider": _window(tg.Sliding("2s", "500ms"), x=tg.sum("v")),
    "cumulating": _window(tg.Cumulating("500ms", "2s"), x=tg.sum("v")),
    "session": _window(tg.Session("700ms"), x=tg.sum("v")),
    "session with a wider gap": _window(tg.Session("900ms"), x=tg.sum("v")),
    "session with a gap of each row": _window(tg.Session(pl.col("v") + 1), x=tg.sum("v")),
    "session with another gap of each row": _window(tg.Session(pl.col("v") + 2), x=tg.sum("v")),
    "apply of sessions with a gap of each row": _apply(tg.Session(pl.col("v") + 1)),
    "apply of sessions with another gap of each row": _apply(tg.Session(pl.col("v") + 2)),
    "count of 5": _window(tg.Count(5), x=tg.sum("v")),
    "count of 6": _window(tg.Count(6), x=tg.sum("v")),
    "count of 6 after every 2": _window(tg.Count(6, slide=2), x=tg.sum("v")),
    "count of 6 after every 3": _window(tg.Count(6, slide=3), x=tg.sum("v")),
    "count of 5 or 1 h": _window(tg.Count(5, timeout="1h"), x=tg.sum("v")),
    "count of 5 or 2 h": _window(tg.Count(5, timeout="2h"), x=tg.sum("v")),
    "apply 1 s": _apply(tg.Tumbling("1s")),
    "apply 2 s": _apply(tg.Tumbling("2s")),
    "apply of sessions": _apply(tg.Session("700ms")),
    "window top 2": _window_top(tg.Tumbling("1s")),
    "window top 3": _window_top(tg.Tumbling("1s"), 3),
    "window bottom 2": _window_top(tg.Tumbling("1s"), 2, descending=False),
    "window top 2 of 2 s": _window_top(tg.Tumbling("2s")),
    "top 2": _top(),
    "top 3": _top(3),
    "bottom 2": _top(descending=False),
    "top 2 by t": _top(by="t"),
    "top 2 for a while": _top(ttl="1h"),
    "first row": _dedup(),
    "first row for a while": _dedup(ttl="1h"),
    "first row by v": _dedup("v"),
    "last row by v": _dedup("v", keep="last"),
    "join": _join(),
    "join for a while": _join(ttl="1h"),
    "left join": _join(how="left"),
    "window join": _join(window=tg.Tumbling("1s")),
    "window join of 2 s": _join(window=tg.Tumbling("2s")),
    "interval join": _interval((0, 500)),
    "wider interval join": _interval((0, 900)),
    "left interval join": _interval((0, 500), "left"),
    "as-of join": _asof(),
    "join of newest rows": _latest(),
    "join of newest rows, always": _latest(emit="always"),
    "join of newest rows for a while": _latest(ttl="1h"),
    "inner as-of join": _asof("inner"),
}
"""Steps of one uid. No two of them mean the same."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_pairs_of_programs_are_refused_or_the_same(tmp_path: Path, seed: int) -> None:
    """Each old program meets others that mean something else: all are refused, and the old one still restores."""
    random = Random(seed)
    names = list(PROGRAMS)
    mine = names[seed::8]
    for old in mine:
        folder = tmp_path / str(names.index(old))
        folder.mkdir()
        path, _ = _run(folder, PROGRAMS[old], restore=None)
        assert path is not None
        for new in random.sample([name for name in names if name != old], 8):
            assert "op" in _refusal(folder, PROGRAMS[new], path), f"{old} -> {new}"
        _run(folder, PROGRAMS[old], restore=path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [
        _window(tg.Tumbling("1s"), x=tg.sum("v")),
        _apply(tg.Session("1s")),
        _window_top(tg.Tumbling("1s")),
        _updates("1h"),
        _dedup("v", keep="last", ttl="1h"),
        _interval((0, 500)),
        _asof(),
    ],
    ids=["window", "apply", "window top", "ttl", "deduplicate", "interval join", "as-of join"],
)
def test_times_that_are_computed_otherwise_are_refused(tmp_path: Path, step: Step) -> None:
    """The column of event time keeps its name, and `assign_timestamps` has no uid that could show the change."""

    def timed(times: str | pl.Expr) -> Step:
        return lambda stream: step(stream.assign_timestamps(times))

    twice = (pl.col("t") * 2).alias("t")
    for number, (old, new) in enumerate([("t", twice), (twice, "t"), (twice, (pl.col("t") * 3).alias("t"))]):
        folder = tmp_path / str(number)
        path, _ = _run(folder, timed(old), restore=None)
        assert path is not None
        assert "time expression" in _refusal(folder, timed(new), path)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["columnar", "rocksdb"])
def test_stored_rows_keep_their_types(tmp_path: Path, backend: str) -> None:
    """The error has the columns of the program, and none that tidegate stores with them."""

    def ranked(kind: type[pl.DataType]) -> Step:
        return lambda stream: _keyed(stream.with_columns(v=pl.col("v").cast(kind))).top_n(2, "t", uid="op")

    def joined(kind: type[pl.DataType]) -> Step:
        return lambda stream: stream.with_columns(v=pl.col("v").cast(kind)).join(
            stream.select("k", w="v"), on="k", uid="op"
        )

    for number, step in enumerate((ranked, joined)):
        folder = tmp_path / str(number)
        path, _ = _run(folder, step(pl.Int32), restore=None, backend=backend)
        assert path is not None
        text = _refusal(folder, step(pl.Int64), path)
        assert "v: int32" in text
        assert "v: int64" in text
        assert "stored rows keep their columns and types; cast or rename columns before the step" in text
        assert "_tidegate" not in text


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["columnar", "rocksdb"])
@pytest.mark.parametrize("windows", [False, True])
def test_aggregates_are_added_and_removed(tmp_path: Path, backend: str, windows: bool) -> None:
    """An added one begins empty, wherever it stands; a removed one goes with consent alone; the others go on."""

    def program(**aggregates: tg.Aggregate) -> Step:
        return _window(tg.Tumbling("20s"), **aggregates) if windows else _aggregate(**aggregates)

    old = program(a=tg.sum("v"), b=tg.max("v"), c=tg.count())
    path, _ = _run(tmp_path, old, restore=None, backend=backend)
    assert path is not None
    new = program(
        least=tg.min("v"), c=tg.count(), n=tg.count(), mean=tg.mean("v"), a=tg.sum("v"), s=tg.sum("v"), u=tg.last("v")
    )
    assert "allow_non_restored_state" in _refusal(tmp_path, new, path, allow=False)
    _, found = _run(tmp_path, new, restore=path, allow=True, backend=backend)
    seen = [{"k": x % 5, "v": (x * 7) % 11, "late": x >= GATE} for x in range(ROWS)]
    for row in found:
        all_of = [each["v"] for each in seen if each["k"] == row["k"]]
        later = [each["v"] for each in seen if each["k"] == row["k"] and each["late"]]
        assert (row["a"], row["c"]) == (sum(all_of), len(all_of))
        assert (row["n"], row["s"], row["least"], row["u"]) == (len(later), sum(later), min(later), later[-1])
        assert row["mean"] == pytest.approx(sum(later) / len(later))
    assert len(found) == 5


@pytest.mark.slow
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("backend", ["columnar", "rocksdb"])
def test_variances_and_standard_deviations_become_each_other(tmp_path: Path, windows: bool, backend: str) -> None:
    """They keep the same moments. The results are those of all rows, before and behind the savepoint."""
    spreads = [tg.var_pop, tg.var_samp, tg.stddev_pop, tg.stddev_samp]

    def program(shift: int) -> Step:
        what = {name: spreads[(at + shift) % 4]("v") for at, name in enumerate("abcd")}
        return _window(tg.Tumbling("20s"), **what) if windows else _aggregate(**what)

    path, _ = _run(tmp_path, program(0), restore=None, backend=backend)
    assert path is not None
    _, found = _run(tmp_path, program(1), restore=path, backend=backend)
    for row in found:
        v = [(x * 7) % 11 for x in range(ROWS) if x % 5 == row["k"]]
        expected = [statistics.variance(v), statistics.pstdev(v), statistics.stdev(v), statistics.pvariance(v)]
        assert [row[name] for name in "abcd"] == pytest.approx(expected)
    assert len(found) == 5


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["columnar", "rocksdb"])
def test_updates_and_results_of_each_row_become_each_other(tmp_path: Path, backend: str) -> None:
    """The state is the same. Results go on from the rows before the savepoint; values that are counted are kept
    otherwise."""

    def program(emit: str, **more: tg.Aggregate) -> Step:
        return lambda stream: _keyed(stream).aggregate(n=tg.count(), x=tg.sum("v"), **more, emit=emit, uid="op")

    for old, new in (("update", "each"), ("each", "update")):
        folder = tmp_path / old
        path, _ = _run(folder, program(old), restore=None, backend=backend)
        assert path is not None
        _, found = _run(folder, program(new), restore=path, backend=backend)
        for key in range(5):
            rows = [x for x in range(ROWS) if x % 5 == key]
            sums = [(n, sum((x * 7) % 11 for x in rows[:n])) for n in range(1, len(rows) + 1)]
            so_far = [(row["n"], row["x"]) for row in found if row["k"] == key]
            assert so_far[-1] == sums[-1]
            if new == "each":
                assert so_far == sums[-len([x for x in rows if x >= GATE]) :]
        assert "emit final" in _refusal(folder, program("final"), path)
    folder = tmp_path / "distinct"
    path, _ = _run(folder, program("update", d=tg.count_distinct("v")), restore=None)
    assert path is not None
    assert "kept in other columns" in _refusal(folder, program("each", d=tg.count_distinct("v")), path)


@pytest.mark.slow
@pytest.mark.parametrize("windows", [False, True])
def test_types_of_aggregates_widen(tmp_path: Path, windows: bool) -> None:
    """A column of int32 that becomes one of int64, and one of integers that becomes one of floats."""

    def program(dtype: type[pl.DataType]) -> Step:
        def made(stream: Any) -> Any:
            typed = stream.with_columns(v=pl.col("v").cast(dtype), uid="typed")
            what = {"least": tg.min("v"), "total": tg.sum("v"), "mean": tg.mean("v")}
            return (_window(tg.Tumbling("20s"), **what) if windows else _aggregate(**what))(typed)

        return made

    path, _ = _run(tmp_path, program(pl.Int32), restore=None)
    assert path is not None
    _, found = _run(tmp_path, program(pl.Float64), restore=path)
    for row in found:
        all_of = [(x * 7) % 11 for x in range(ROWS) if x % 5 == row["k"]]
        assert (row["least"], row["total"]) == (float(min(all_of)), float(sum(all_of)))
        assert row["mean"] == pytest.approx(sum(all_of) / len(all_of))
    assert "cannot become" in _refusal(tmp_path, program(pl.Int8), path)


@pytest.mark.slow
def test_a_refusal_leaves_the_table_as_it_is(tmp_path: Path) -> None:
    """A table that would get a column keeps its columns, and the old program still restores."""

    def program(env: tg.StreamEnvironment, source: GatedSource, **aggregates: tg.Aggregate) -> tg.OutputTable:
        rows = _aggregate(**aggregates)(_rows(env, source))
        return rows.to_table(f"{tmp_path}/table", uid="table", schema_evolution="add_columns")  # type: ignore[no-any-return]

    with opening(GatedSource(ROWS, gates=(GATE,))) as source, local(1, 5) as env:
        program(env, source, x=tg.sum("v"))
        job = env.execute("table", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        source.await_gate(GATE)
        path = job.stop(savepoint=str(tmp_path / "savepoint"))
    with local(1, 5) as env:
        program(env, GatedSource(ROWS), x=tg.max("v"), y=tg.count())
        with pytest.raises(tg.IncompatibleStateError, match=r"x=sum\(v\), and the program aggregate x=max\(v\)"):
            env.execute("table", checkpoints=config(tmp_path / "checkpoints"), restore=path)
    assert tg.open_table(f"{tmp_path}/table").to_arrow().column_names == ["k", "x"]
    with local(1, 5) as env:
        table = program(env, GatedSource(ROWS), x=tg.sum("v"))
        job = env.execute("table", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART, restore=path)
        assert job.wait("4min") == "finished"
        assert table.to_arrow().num_rows == 5


@pytest.mark.slow
def test_a_restore_is_checked_without_a_start(tmp_path: Path) -> None:
    """The report names what is restored, started empty, dropped, converted and refused; nothing is written."""
    path, _ = _run(tmp_path, _aggregate(a=tg.sum("v"), b=tg.max("v")), restore=None)
    assert path is not None

    def report(step: Step, allow: bool = False) -> tg.RestoreReport:
        before = sorted(str(found) for found in tmp_path.rglob("*"))
        with local(1, 5) as env:
            step(_rows(env, GatedSource(ROWS))).collect(uid="out again")
            found = env.check_restore(path, allow_non_restored_state=allow)
        assert before == sorted(str(found) for found in tmp_path.rglob("*"))
        return found

    same = report(_aggregate(a=tg.sum("v"), b=tg.max("v")))
    assert same == tg.RestoreReport(same.path, restored=("in", "op"))
    other = report(_aggregate(c=tg.count(), a=tg.sum("v")), allow=True)
    assert (other.started_empty, other.dropped) == (("op: aggregate c",), ("op: aggregate b",))
    assert other.ok
    refused = report(_aggregate(a=tg.min("v"), b=tg.max("v")))
    assert not refused.ok
    assert refused.restored == ("in",)
    assert "aggregate a=sum(v), and the program aggregate a=min(v)" in str(refused)
    keyed = report(lambda rows: rows.key_by("x").aggregate(a=tg.sum("v"), b=tg.max("v"), emit="final", uid="op"))
    assert keyed.refused is not None
    assert "the checkpoint has keys (k), and the program keys (x)" in keyed.refused
    assert keyed.refused.count("the program") == 1, "other keys are reported twice"


_PROGRAM = """
import polars as pl
from local_jobs import GatedSource

import tidegate as tg

def main(env):
    rows = env.from_source(GatedSource({rows}), uid="in").with_columns(v=pl.col("x"), uid="columns")
    rows.key_by("k").aggregate(x={aggregate}, emit="final", uid="op").collect(uid="out")
    env.execute("rows", checkpoints=tg.CheckpointConfig(storage="{root}"))
"""


@pytest.mark.slow
def test_the_command_checks_a_restore(tmp_path: Path) -> None:
    """`tidegate run --restore PATH --check` prints the report, and ends with 1 for a refusal."""
    # A savepoint before the end: an operator that has finished keeps no state.
    with opening(GatedSource(ROWS, gates=(GATE,))) as source, local(1, 5) as env:
        rows = env.from_source(source, uid="in").with_columns(v=pl.col("x"), uid="columns")
        rows.key_by("k").aggregate(x=tg.sum("v"), emit="final", uid="op").collect(uid="out")
        job = env.execute("rows", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        source.await_gate(GATE)
        path = job.stop(savepoint=str(tmp_path / "savepoint"))
    for aggregate, code, said in (('tg.sum("v")', 0, "restored: "), ('tg.max("v")', 1, "refused: ")):
        # A file of its own: Python takes bytecode for new where size and second of a file are the same.
        program = tmp_path / f"program_{code}.py"
        program.write_text(_PROGRAM.format(aggregate=aggregate, rows=ROWS, root=tmp_path / "checkpoints"))
        done = CommandRunner().invoke(app, ["run", f"{program}:main", "--restore", path, "--check"])
        assert (done.exit_code, said in done.output) == (code, True), done.output
