"""What is missing is named with the extra that brings it, by whoever needs it first."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from waiting import until

import tidegate as tg
from tidegate.state.common.options import StateBackendOptions
from tidegate.state.factory import open_backend
from tidegate.storage.extras import EXTRAS, load, need
from tidegate.storage.files.file_system_store import FileSystemStore

ROWS = pa.table({"key": ["a", "b"], "x": [1, 2]})


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which only the core is installed."""
    for names in EXTRAS.values():
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)


def counted(tmp_path: Path, **settings: object) -> None:
    """A small job with keyed state."""
    with tg.StreamEnvironment.local() as env:
        env.from_batches(ROWS).key_by("key").aggregate(n=tg.count(), emit="final").to_table(
            tmp_path / "out", mode="append"
        )
        checkpoints = tg.CheckpointConfig.model_validate({"storage": str(tmp_path / "checkpoints"), **settings})
        env.execute("counted", checkpoints=checkpoints).wait()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda path: tg.StreamEnvironment.ray(), r"^StreamEnvironment.ray needs ray, .*'tidegate\[ray\]'"),
        (
            lambda path: tg.StreamEnvironment.raydp(),
            r"^StreamEnvironment.raydp needs ray and pyspark and raydp, .*'tidegate\[raydp\]'",
        ),
        (
            lambda path: tg.StreamEnvironment.on_spark(object()),  # type: ignore[arg-type]
            r"^StreamEnvironment.on_spark needs ray and pyspark, .*'tidegate\[ray,spark\]'",
        ),
        (lambda path: FileSystemStore("s3://bucket/a"), r"^storage at s3://bucket/a needs s3fs, .*'tidegate\[s3\]'"),
        (lambda path: counted(path, storage="s3://bucket/a"), r"'tidegate\[s3\]'"),
        (
            lambda path: counted(path, backend="rocksdb"),
            r"^the rocksdb backend needs rocksdict, .*'tidegate\[rocksdb\]'",
        ),
        (
            lambda path: open_backend(StateBackendOptions(kind="rocksdb", directory="/x"), None),  # type: ignore[arg-type]
            r"^the rocksdb backend needs rocksdict",
        ),
    ],
)
@pytest.mark.usefixtures("bare")
def test_the_error_names_library_and_extra(use: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    """Before anything has started: no table was claimed."""
    with pytest.raises(tg.ConfigurationError, match=message):
        use(tmp_path)
    assert not (tmp_path / "out" / "_tidegate").exists()


@pytest.mark.parametrize(
    "make",
    [
        tg.StreamEnvironment.ray,
        tg.StreamEnvironment.raydp,
        lambda **settings: tg.StreamEnvironment.on_spark(object(), **settings),  # type: ignore[arg-type]
    ],
    ids=["ray", "raydp", "on_spark"],
)
@pytest.mark.usefixtures("bare")
def test_wrong_settings_are_told_before_what_is_missing(make: Callable[..., tg.StreamEnvironment]) -> None:
    """Nobody installs Spark to be told that a number is wrong."""
    with pytest.raises(tg.ConfigurationError, match="standbys: 'few' is not a number of spare processes"):
        make(standbys="few")


def test_a_checkpoint_of_rocksdb_is_refused_where_its_library_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever backend the new job has: only that library reads the files. The error comes at submission."""
    checkpoints = {"storage": str(tmp_path / "checkpoints")}
    with tg.StreamEnvironment.local() as env:
        env.from_rate(1_000).key_by("value").aggregate(n=tg.count(), emit="final").collect()
        job = env.execute("counted", checkpoints=tg.CheckpointConfig(backend="rocksdb", **checkpoints))
        until("rows in state", lambda: job.progress().rows_in.get("aggregate-1"))
        savepoint = job.stop(savepoint=tmp_path / "savepoints", format="native")
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    with tg.StreamEnvironment.local() as env:
        env.from_rate(1_000).key_by("value").aggregate(n=tg.count(), emit="final").collect()
        with pytest.raises(tg.ConfigurationError, match=r"^restore=.*, a checkpoint .* needs rocksdict"):
            env.execute("counted", checkpoints=tg.CheckpointConfig(**checkpoints), restore=savepoint)


def test_only_extras_that_lack_something_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Ray is installed nobody is told to install it; where all is there nothing is said."""
    need("anything", "ray", "spark", "s3")
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(tg.ConfigurationError, match=r"^this needs pyspark, .*pip install 'tidegate\[spark\]'"):
        need("this", "ray", "spark")


def test_a_library_that_is_broken_is_told_from_one_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own error is in the message: installing it once more would say that it is there."""
    (tmp_path / "deltalake.py").write_text("raise ImportError('libfoo.so.1: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "deltalake", raising=False)
    with pytest.raises(tg.ConfigurationError, match=r"cannot be loaded \(libfoo.so.1: .*--force-reinstall"):
        load("a Delta Lake table", "delta", "deltalake")
