"""Whatever can be known to be wrong is refused before anything starts, with what was wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import config, local

import tidegate as tg

DATA = pa.table({"k": [1, 2], "name": ["a", "b"]})

Build = Callable[[tg.StreamEnvironment, Path], object]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        pytest.param(
            lambda env, _: env.from_batches(DATA).key_by("x"), r"no column 'x'; name one of .k: int64", id="key"
        ),
        pytest.param(lambda env, _: env.from_batches(DATA).key_by(), "at least one column", id="no key"),
        pytest.param(lambda env, _: env.from_batches(DATA).key_by("k", "k"), "named twice", id="key twice"),
        pytest.param(
            lambda env, _: env.from_batches(DATA).key_by("k").aggregate(s=tg.sum("x")), "no column 'x'", id="aggregate"
        ),
        pytest.param(
            lambda env, _: env.from_batches(DATA).key_by("k").aggregate(s=tg.sum("name")),
            "sum takes integers, floats, ",
            id="aggregate of text",
        ),
        pytest.param(lambda env, _: env.from_batches(DATA).select("x"), "x", id="select"),
        pytest.param(
            lambda env, _: env.from_batches(DATA).with_columns(pl.col("x") + 1), "x", id="expression over no column"
        ),
        pytest.param(
            lambda env, _: env.from_batches(DATA).map(lambda row: row, traced=False).collect(),
            "Give schema= to .map.",
            id="no schema",
        ),
        pytest.param(
            lambda env, _: env.from_batches(DATA).union(env.from_batches(DATA.select(["k"]))),
            "different columns",
            id="union",
        ),
        pytest.param(
            lambda env, _: env.from_batches(DATA).union(local().from_batches(DATA)),
            "different environments",
            id="union of two environments",
        ),
        pytest.param(
            lambda env, path: env.from_batches(DATA).to_table(str(path), mode="upsert"), r"needs keys=\[", id="upsert"
        ),
        pytest.param(
            lambda env, path: env.from_batches(DATA).to_table(str(path), mode="upsert", keys=["x"]),
            "'x' is not among",
            id="upsert key",
        ),
        pytest.param(
            lambda env, path: [env.from_batches(DATA).to_table(str(path / "t" / ".." / "t")) for _ in range(2)],
            "two streams of one job write to",
            id="one table twice",
        ),
        pytest.param(lambda env, _: env.from_batches(DATA, splits=0), "splits=0", id="splits"),
        pytest.param(lambda env, _: env.from_batches([]), "at least one batch", id="no batch"),
        pytest.param(lambda env, _: env.spark, "has no Spark", id="spark"),
        pytest.param(lambda env, _: local(parallelism=0), "parallelism=0", id="parallelism"),
    ],
)
def test_refused_while_the_program_is_made(tmp_path: Path, build: Build, message: str) -> None:
    """A wrong step of the program is an error at that step."""
    with local() as env, pytest.raises(tg.TidegateError, match=message):
        build(env, tmp_path)


def collected(env: tg.StreamEnvironment) -> tg.CollectedRows:
    """A program without a fault."""
    return env.from_batches(DATA, uid="source").collect(uid="rows")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"restore": "nonsense"}, "names no checkpoint", id="no path"),
        pytest.param({"restore": "/nowhere/job-12345678/chk-3"}, "no completed checkpoint", id="no checkpoint"),
        pytest.param({"name": "?!"}, "needs at least one letter or digit", id="name"),
    ],
)
def test_refused_when_the_job_is_executed(tmp_path: Path, options: dict[str, str], message: str) -> None:
    """A wrong argument of execute starts nothing, and the program can be executed again as it should be."""
    with local() as env:
        found = collected(env)
        with pytest.raises(tg.ConfigurationError, match=message):
            env.execute(**{"name": "job", **options}, checkpoints=config(tmp_path))
        env.execute("job", checkpoints=config(tmp_path)).wait("4min")

    assert found.to_arrow().sort_by("k") == DATA


@pytest.mark.parametrize(
    ("build", "message"),
    [
        pytest.param(lambda env: None, "has no source; begin .*from_files, from_rows or from_batches", id="nothing"),
        pytest.param(
            lambda env: env.from_batches(DATA, uid="same").collect(uid="same"),
            r"both have uid 'same'.*create the environment and",
            id="uid twice",
        ),
        pytest.param(
            lambda env: env.from_batches(DATA, parallelism=40_000), "not between 1 and 32768", id="parallelism"
        ),
    ],
)
def test_refused_programs(tmp_path: Path, build: Callable[[tg.StreamEnvironment], object], message: str) -> None:
    """What only the whole program shows is an error of execute."""
    with local() as env:
        build(env)
        with pytest.raises(tg.ConfigurationError, match=message):
            env.execute("job", checkpoints=config(tmp_path))


@pytest.mark.parametrize("place", ["checkpoints", "table"])
def test_storage_without_conditional_create_is_refused(tmp_path: Path, place: str) -> None:
    """Fencing rests on it, for jobs and for tables, so a store that overwrites is found out before the job starts."""
    from tidegate.actors.local.local_runtime import LocalRuntime
    from tidegate.storage.files.file_system_store import FileSystemStore
    from tidegate.storage.files.store import Buffer

    class Overwriting(FileSystemStore):
        def create(self, path: str, data: Buffer) -> None:
            if self.url.endswith(place):
                self.write(path, [data])
            else:
                super().create(path, data)

    env = tg.StreamEnvironment(LocalRuntime(Overwriting), 1, open_store=Overwriting)
    env.from_batches(DATA).to_table(str(tmp_path / "table"))
    with env, pytest.raises(tg.ConfigurationError, match=f"{tmp_path / place} has no conditional create"):
        env.execute("job", checkpoints=config(tmp_path / "checkpoints"))
    assert not (tmp_path / "table" / "_tidegate").exists(), "nothing was claimed"


def test_operators_without_a_uid_get_one_that_stays() -> None:
    """The same program has the same uids, so that it can be restored without naming any."""

    def uids() -> list[str]:
        env = local()
        env.from_batches(DATA).key_by("k").aggregate(n=tg.count()).collect()
        submission = env.plan("job", checkpoints=config("memory://test-submission"))
        return [info.uid for info in submission.spec.operators]

    assert uids() == uids() == ["from_batches-0", "aggregate-1", "collect-2"]


def test_settings_of_the_environment_apply_unless_the_job_has_its_own(tmp_path: Path) -> None:
    """config= of the environment is the default for its jobs."""
    mapping = {"execution.checkpointing.interval": "5s", "state.checkpoints.dir": str(tmp_path / "default")}
    env = tg.StreamEnvironment.local(1, config=mapping)
    collected(env)
    default = env.plan("job").spec
    own = env.plan("job", checkpoints=config(tmp_path / "own", interval="1s")).spec

    assert (default.root, default.checkpoints.interval_ms) == (str(tmp_path / "default"), 5_000)
    assert (own.root, own.checkpoints.interval_ms) == (str(tmp_path / "own"), 1_000)


def test_a_program_is_executed_once(tmp_path: Path) -> None:
    """A second execute finds an empty program. The error names the job that ran the streams."""
    with local() as env:
        collected(env)
        env.execute("first", checkpoints=config(tmp_path)).wait("4min")
        with pytest.raises(tg.ConfigurationError, match=r"already, as the job 'first'.* from their sources again"):
            env.execute("second", checkpoints=config(tmp_path))
