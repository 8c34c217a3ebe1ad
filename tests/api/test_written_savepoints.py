"""Savepoints made or changed without a job: jobs restore them and go on, and they read back as they were put."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import Result
from command_line import CommandRunner
from dying_store import DiedError, LostAnswers, deaths
from hypothesis import given, settings
from hypothesis import strategies as st
from local_jobs import NO_RESTART, GatedSource, config, finish, local, opening

import tidegate as tg
from tidegate import recovery
from tidegate.cli.main import app
from tidegate.cli.row_files import rows_of_files
from tidegate.storage.files.file_system_store import FileSystemStore, open_store

ROWS, GATE = 40, 20
OUT = pa.schema({"k": pa.int64(), "n": pa.int64(), "seen": pa.int64()})
N = tg.ValueState("n", pa.int64())


class Counts(tg.ProcessFunction):
    """Counts rows of a key and keeps them, and tells both."""

    def open(self, context: tg.ProcessContext) -> None:
        self.n = context.state(N)
        self.seen = context.state(tg.ListState("seen", pa.int64()))

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> list[dict[str, Any]]:
        self.n.update((self.n.value() or 0) + 1)
        self.seen.add(row["x"])
        return [{"k": row["k"], "n": self.n.value(), "seen": len(self.seen.get())}]


def build(env: tg.StreamEnvironment, source: GatedSource, *, counts: bool = True) -> list[tg.CollectedRows]:
    """Rows by key: running totals, and `Counts`."""
    rows = env.from_source(source, uid="source").key_by("k")
    tables = [rows.aggregate(total=tg.sum("x"), avg=tg.mean("x"), emit="final", uid="totals").collect(uid="totals-out")]
    if counts:
        tables.append(rows.process(Counts(), schema=OUT, uid="counts").collect(uid="counts-out"))
    return tables


def most(table: pa.Table, column: str) -> dict[int, int]:
    """The greatest value of each key."""
    found = pl.from_arrow(table)
    assert isinstance(found, pl.DataFrame)
    return dict(found.group_by("k").agg(pl.col(column).max()).rows())


@pytest.fixture
def taken(tmp_path: Path) -> str:
    """A savepoint of a job with parallelism 2, after half of its rows."""
    with opening(GatedSource(ROWS, gates=[GATE])) as source, local(2) as env:
        build(env, source)
        job = env.execute("job", checkpoints=config(tmp_path / "ckpt"), restart=NO_RESTART)
        source.await_gate(GATE)
        path = job.savepoint(str(tmp_path / "savepoints"))
        source.open_all()
        job.cancel()
    return path


def test_a_job_begins_with_state_that_was_made_from_rows(tmp_path: Path) -> None:
    """From nothing: state of three operators in all, restored at a parallelism that the writer did not know."""
    keys = list(range(5))
    with recovery.SavepointWriter(str(tmp_path), job="bootstrapped", max_parallelism=128, parallelism=2) as savepoint:
        savepoint.with_keyed_state(
            uid="counts", keys=["k"], state=N, rows=pa.table({"k": keys, "n": pa.array([100] * 5, pa.int32())})
        )
        savepoint.with_keyed_state(
            uid="counts",
            keys=["k"],
            state=tg.ListState("seen", pa.int64()),
            rows=pl.DataFrame({"k": [1], "seen": [[7, 8]]}),
        )
        rows = pa.table({"k": keys, "total": [1_000] * 5, "_tidegate_avg.sum": [0] * 5, "_tidegate_avg.count": [0] * 5})
        savepoint.with_keyed_state(uid="totals", keys=["k"], state="aggregate", rows=rows)

    assert recovery.verify(savepoint.path).ok
    with opening(GatedSource(ROWS)) as source, local(3) as env:
        totals, counts = build(env, source)
        finish(env, tmp_path / "ckpt", restore=savepoint.path)
    assert most(counts.to_arrow(), "n") == dict.fromkeys(keys, 100 + ROWS // 5)
    assert most(counts.to_arrow(), "seen") == {k: ROWS // 5 + (2 if k == 1 else 0) for k in keys}
    assert most(totals.to_arrow(), "total") == {k: 1_000 + sum(range(k, ROWS, 5)) for k in keys}


def test_a_savepoint_is_repaired_and_its_job_goes_on(taken: str, tmp_path: Path) -> None:
    """One state is replaced by what SQL made of it; all others, and the position of the source, stay."""
    n = recovery.read_state(taken, uid="counts", state="n")
    repaired = n.set_column(1, "n", pa.compute.add(n["n"], 1_000))
    with recovery.SavepointWriter(str(tmp_path / "repaired"), base=taken) as savepoint:
        savepoint.with_keyed_state(uid="counts", keys=["k"], state=N, rows=repaired)

    old, new = recovery.inspect(taken), recovery.inspect(savepoint.path)
    assert [operator.uid for operator in new.operators] == [operator.uid for operator in old.operators]
    changes = recovery.diff(taken, savepoint.path, keys=True)
    states = {(s.uid, s.state): s.keys for operator in changes.operators for s in operator.states if s.keys is not None}
    assert states["counts", "n"] == recovery.KeyChanges(0, 0, 5, 0)
    assert states["counts", "seen"] == states["totals", "aggregate"] == recovery.KeyChanges(0, 0, 0, 5)
    with opening(GatedSource(ROWS)) as source, local(3) as env:
        totals, counts = build(env, source)
        finish(env, tmp_path / "ckpt", restore=savepoint.path)
    assert most(counts.to_arrow(), "n") == dict.fromkeys(range(5), 1_000 + ROWS // 5)
    assert most(counts.to_arrow(), "seen") == dict.fromkeys(range(5), ROWS // 5)
    assert most(totals.to_arrow(), "total") == {k: sum(range(k, ROWS, 5)) for k in range(5)}


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_state_is_written_from_the_shell(taken: str, tmp_path: Path, suffix: str) -> None:
    """What `state read` has written goes into a savepoint that is changed, and into a new one."""
    file, target = str(tmp_path / f"n.{suffix}"), str(tmp_path / "written")
    assert run("state", "read", taken, "--uid", "counts", "--state", "n", "--out", file).exit_code == 0
    put = ("--uid", "counts", "--state", "n")

    changed = json.loads(run("state", "write", target, file, *put, "--base", taken, "--json").stdout)["path"]
    (made,) = run("state", "write", target, file, *put, "--job", "clicks", "--key", "k").stdout.splitlines()

    n = recovery.read_state(taken, uid="counts", state="n").sort_by("k")
    for path in (changed, made):
        assert recovery.read_state(path, uid="counts", state="n").sort_by("k").equals(n)
    assert len(recovery.inspect(changed).operators) == len(recovery.inspect(taken).operators)
    for wrong, text in (
        ((file, *put, "--job", "clicks"), "give keys="),
        ((str(tmp_path / "gone.parquet"), *put, "--base", taken), "gone.parquet cannot be read"),
        ((file, *put), "give either job=, to begin without state, or base="),
    ):
        result = run("state", "write", str(tmp_path / "wrong"), *wrong)
        assert result.exit_code == 2
        assert text in result.output


def test_files_of_other_columns_are_refused(tmp_path: Path) -> None:
    """Several files are one table."""
    for name in ("k", "other"):
        pq.write_table(pa.table({name: [1]}), tmp_path / f"{name}.parquet")
    assert rows_of_files([str(tmp_path / "k.parquet")] * 2).read_all().num_rows == 2
    with pytest.raises(tg.ConfigurationError, match=r"other\.parquet has columns"):
        rows_of_files([str(tmp_path / f"{name}.parquet") for name in ("k", "other")]).read_all()


def run(*arguments: str) -> Result:
    """The `tidegate` command."""
    return CommandRunner().invoke(app, arguments)


def test_operators_and_states_are_dropped(taken: str, tmp_path: Path) -> None:
    """A program without an operator starts from what is left; a dropped state begins empty."""
    with recovery.SavepointWriter(str(tmp_path / "less"), base=taken) as less:
        less.without_operator("counts")
        less.without_operator("counts-out")
    assert recovery.inspect(less.path).operator("counts") is None
    with opening(GatedSource(ROWS)) as source, local(1) as env:
        (totals,) = build(env, source, counts=False)
        finish(env, tmp_path / "ckpt", restore=less.path)
    assert most(totals.to_arrow(), "total") == {k: sum(range(k, ROWS, 5)) for k in range(5)}

    with recovery.SavepointWriter(str(tmp_path / "state"), base=taken) as fresh:
        fresh.without_state("counts", "n")
    with pytest.raises(tg.ConfigurationError, match="no state 'n'"):
        recovery.read_state(fresh.path, uid="counts", state="n")
    assert recovery.read_state(fresh.path, uid="counts", state="seen").num_rows == 5


def test_state_of_subtasks_is_put(tmp_path: Path) -> None:
    """Lists are dealt out, maps are there once."""
    with recovery.SavepointWriter(str(tmp_path), job="parts", parallelism=3) as savepoint:
        savepoint.with_operator_state(uid="parts", state=tg.ListState("rows", int), rows=pa.table({"rows": range(10)}))
        savepoint.with_operator_state(
            uid="parts", state=tg.ListState("all", int), rows=pa.table({"all": [1, 2]}), kind="union"
        )
        savepoint.with_broadcast_state(
            uid="parts", state=tg.MapState("rules", int, str), rows=pa.table({"key": [1, 2], "value": ["a", "b"]})
        )
    read = {name: recovery.read_state(savepoint.path, uid="parts", state=name) for name in ("rows", "all", "rules")}
    assert sorted(read["rows"]["rows"].to_pylist()) == list(range(10))
    assert read["all"].to_pylist() == [{"all": 1}, {"all": 2}]
    assert read["rules"].to_pylist() == [{"key": 1, "value": "a"}, {"key": 2, "value": "b"}]
    sizes = [s.handle.sections[0].rows for s in recovery.inspect(savepoint.path).metadata.subtasks if s.handle]
    assert sizes == [4, 3, 3]


def test_none_is_overwritten(taken: str, tmp_path: Path) -> None:
    """Beside its base a savepoint would have its name; nothing of the base changes."""
    before = {path: path.read_bytes() for path in Path(taken).rglob("*") if path.is_file()}
    with pytest.raises(tg.StorageError, match="is a savepoint already, and none is overwritten"):
        recovery.SavepointWriter(str(Path(taken).parent), base=taken)
    assert {path: path.read_bytes() for path in Path(taken).rglob("*") if path.is_file()} == before


def test_what_fails_leaves_no_savepoint(tmp_path: Path) -> None:
    """Metadata comes last: a writer whose block or storage fails leaves nothing behind."""

    class Broken(FileSystemStore):
        def create(self, path: str, data: Any) -> None:
            raise tg.StorageError(f"no {path} today")

    def opened(url: str) -> FileSystemStore:
        return Broken(url)

    rows = pa.table({"k": range(50_000), "n": range(50_000)})
    writer = recovery.SavepointWriter(str(tmp_path), job="job", open_store=opened)
    with pytest.raises(tg.StorageError, match="no _metadata today"), writer as savepoint:
        savepoint.with_keyed_state(uid="counts", keys=["k"], state=N, rows=rows)
    with pytest.raises(tg.ConfigurationError), recovery.SavepointWriter(str(tmp_path), job="job") as savepoint:
        savepoint.with_keyed_state(uid="counts", keys=["k"], state=N, rows=rows).without_operator("counts")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert recovery.list_checkpoints(str(tmp_path)) == []


@pytest.mark.slow
@pytest.mark.parametrize("based", [False, True], ids=["from nothing", "from a base"])
def test_wherever_a_writer_dies_its_savepoint_is_whole_or_none(tmp_path: Path, taken: str, based: bool) -> None:
    """At any operation on storage; the base stays whole, and the same call made again writes it or finds it written."""
    rows = pa.table({"k": range(20_000), "n": range(20_000)})
    target = tmp_path / "written"

    def write(opened: Callable[[str], FileSystemStore] = open_store) -> str:
        source: Any = {"base": taken} if based else {"job": "job"}
        with recovery.SavepointWriter(str(target), **source, open_store=opened) as writer:
            writer.with_keyed_state(uid="counts", keys=["k"], state=N, rows=rows)
        return writer.path

    survived = 0
    for death in deaths():
        with contextlib.suppress(DiedError):
            write(death.open_store)
        found = recovery.list_checkpoints(str(target))
        assert all(recovery.verify(savepoint.path).ok for savepoint in found)
        if found:
            survived += 1
            shutil.rmtree(target)
    assert survived == 2, "the last create took effect, and nobody died at all"
    assert recovery.verify(write()).ok
    assert recovery.verify(taken).ok


def test_a_lost_answer_to_the_last_create_is_no_failure(tmp_path: Path) -> None:
    """The files of a savepoint that is there after all are not deleted, even if nobody could find out at first."""
    rows = pa.table({"k": range(50_000), "n": range(50_000)})

    def write(folder: str, opened: Callable[[str], FileSystemStore]) -> None:
        with recovery.SavepointWriter(str(tmp_path / folder), job="job", open_store=opened) as savepoint:
            savepoint.with_keyed_state(uid="counts", keys=["k"], state=N, rows=rows)

    def goes_away(url: str) -> FileSystemStore:
        store = LostAnswers(url)
        store.away = True
        return store

    write("there", LostAnswers)
    with pytest.raises(tg.StorageError, match="storage is away"):
        write("unknown", goes_away)
    for folder in ("there", "unknown"):
        (savepoint,) = recovery.list_checkpoints(str(tmp_path / folder))
        assert recovery.verify(savepoint.path).ok


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (pa.table({"k": [1, 1], "n": [1, 2]}), r"1 rows have a key that came before, such as \{'k': 1\}"),
        (pa.table({"k": [1], "m": [1]}), r"has no column 'n'; it has \['k', 'm'\] and needs \['k', 'n'\]"),
        (pa.table({"k": [1], "n": ["x"]}), r"\(k: int64, n: string\) cannot become \(k: int64, n: int64\)"),
        ([{"k": 1, "n": 1}], "not a list"),
    ],
)
def test_rows_that_do_not_fit_are_refused_at_once(tmp_path: Path, rows: Any, text: str) -> None:
    """Before anything is written, with the state and the operator in the text."""
    writer = recovery.SavepointWriter(str(tmp_path), job="job")
    with pytest.raises(tg.ConfigurationError, match=f"state 'n' of operator 'counts': .*{text}"):
        writer.with_keyed_state(uid="counts", keys=["k"], state=N, rows=rows)


KEYS = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.string(): st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    pa.float64(): st.floats(allow_nan=False),
    pa.date32(): st.dates(),
}
STATES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (tg.ValueState("s", int), st.integers(-(2**63), 2**63 - 1)),
    (tg.ListState("s", str), st.lists(st.sampled_from(["", "a", "b"]), min_size=1, max_size=3)),
    (tg.MapState("s", str, float), st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.5, 1.5]), min_size=1)),
]


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    data=st.data(), key_type=st.sampled_from(list(KEYS)), kind=st.sampled_from(STATES), parallelism=st.integers(1, 5)
)
def test_what_is_put_reads_back(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    key_type: pa.DataType,
    kind: tuple[Any, st.SearchStrategy[Any]],
    parallelism: int,
) -> None:
    """Whatever keys and values are, also through a second writer that changes something else."""
    declared, values = kind
    entries = data.draw(st.dictionaries(KEYS[key_type], values, min_size=1, max_size=20))
    folder = tmp_path_factory.mktemp("savepoint")
    column = [list(v.items()) if isinstance(v, dict) else v for v in entries.values()]
    rows = pa.table({"k": pa.array(list(entries), key_type), "s": pa.array(column, declared.stored_field.type)})
    with recovery.SavepointWriter(str(folder), job="job", max_parallelism=16, parallelism=parallelism) as first:
        first.with_keyed_state(uid="u", keys=["k"], state=declared, rows=rows)
    with recovery.SavepointWriter(str(folder / "second"), base=first.path) as second:
        counted = rows.select(["k"]).append_column("n", pa.array([1] * len(rows)))
        second.with_keyed_state(uid="u", keys=["k"], state=N, rows=counted)

    for path in (first.path, second.path):
        found = recovery.read_state(path, uid="u", state="s")
        assert found.schema.field("k").type == key_type
        read = {
            row["k"]: dict(row["s"]) if isinstance(declared, tg.MapState) else row["s"] for row in found.to_pylist()
        }
        assert read == entries
