"""States that a function does not declare any more: dropped with consent, before anything runs, and gone for good."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, config, local, opening
from waiting import until

import tidegate as tg
from tidegate.actors.local.local_runtime import LocalRuntime
from tidegate.actors.restore.restore_task import subtasks_of
from tidegate.storage.checkpoints.layout import parse_pointer
from tidegate.storage.checkpoints.metadata import read_pointed
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.ids import OperatorUid
from tidegate.storage.state.subtask_state import stored_columns

ROWS, GATE, FAILS_AT, SECOND_GATE = 60, 37, 42, 50
INT = pa.int64()
OUT = pa.schema([("k", INT), ("x", INT), ("n", INT), ("m", INT)])
Step = Callable[[Any], Any]


def _state(context: Any, kind: str, name: str) -> Any:
    match kind:
        case "value":
            return context.state(tg.ValueState(name, INT))
        case "list":
            return context.state(tg.ListState(name, INT))
        case "map":
            return context.state(tg.MapState(name, INT, INT))
        case "window value":
            return context.window_state(tg.ValueState(name, INT))
        case _:
            return getattr(context, kind)(tg.ListState(name, INT))


def _add(state: Any, number: int) -> int:
    """Put one more into a state. Returns how much it has."""
    if isinstance(state, tg.ValueState):
        state.update((state.value() or 0) + 1)
        return int(state.value())
    if isinstance(state, tg.MapState):
        state.put(number, number)
        return len(dict(state.items()))
    state.add(number)
    return len(state.get())


def _fail_once(flag: Path | None, x: int) -> None:
    if flag is not None and x == FAILS_AT and not flag.exists():
        flag.touch()
        raise ValueError("an outage")


class _Counts(tg.ProcessFunction):
    """Counts rows in the value `n`, and in the state `m` if there is a kind for it."""

    def __init__(self, kind: str | None, flag: Path | None) -> None:
        self.kind, self.flag = kind, flag

    def open(self, context: Any) -> None:
        keyed = self.kind not in ("list_state", "union_list_state")
        self.n = _state(context, "value" if keyed else "list_state", "n")
        self.m = None if self.kind in (None, "none, without keys") else _state(context, self.kind, "m")

    def process(self, row: dict[str, Any], context: Any) -> Iterator[dict[str, Any]]:
        _fail_once(self.flag, row["x"])
        m = 0 if self.m is None else _add(self.m, row["x"])
        yield {"k": row["k"], "x": row["x"], "n": _add(self.n, row["x"]), "m": m}


class _CountsAll(_Counts):
    """Counts in a list of the subtask."""

    def open(self, context: Any) -> None:
        self.n = _state(context, "list_state", "n")
        self.m = None if self.kind is None else _state(context, self.kind, "m")


class _Connected(tg.CoProcessFunction):
    """Counts the rows of the first input."""

    def __init__(self, kind: str | None, flag: Path | None) -> None:
        self.kind, self.flag = kind, flag

    open = _Counts.open
    process1 = _Counts.process

    def process2(self, row: dict[str, Any], context: Any) -> None:
        """The second input has no rows."""


class _Rules(tg.KeyedBroadcastProcessFunction):
    """Counts rows in `n`, and keeps those of the broadcast side in the map `m`."""

    def __init__(self, kind: str | None, flag: Path | None) -> None:
        self.kind, self.flag = kind, flag

    def open(self, context: Any) -> None:
        self.n = _state(context, "value", "n")
        self.m = None if self.kind is None else context.broadcast_state(tg.MapState("m", INT, INT))

    def process(self, row: dict[str, Any], context: Any) -> Iterator[dict[str, Any]]:
        _fail_once(self.flag, row["x"])
        m = 0 if self.m is None else len(dict(self.m.items()))
        yield {"k": row["k"], "x": row["x"], "n": _add(self.n, row["x"]), "m": m}

    def process_broadcast(self, row: dict[str, Any], context: Any) -> None:
        if self.m is not None:
            self.m.put(row["x"], row["x"])


class _Window(tg.ProcessWindowFunction):
    """Counts the windows of a key."""

    def __init__(self, kind: str | None, flag: Path | None) -> None:
        self.kind, self.flag = kind, flag

    def open(self, context: Any) -> None:
        self.n = _state(context, "value", "n")
        self.m = None if self.kind is None else _state(context, self.kind, "m")

    def process(self, rows: Any, context: Any) -> dict[str, Any]:
        x = rows["x"].to_pylist()[0]
        _fail_once(self.flag, FAILS_AT if x >= 30 else x)
        m = 0 if self.m is None else _add(self.m, x)
        return {"x": x, "n": _add(self.n, x), "m": m}


def _step(shape: str, kind: str | None, flag: Path | None = None) -> Step:
    """A program: with the state `m`, or without it where `kind` is None."""

    def made(stream: Any) -> Any:
        match shape:
            case "keyed":
                return stream.key_by("k").process(_Counts(kind, flag), schema=OUT, uid="op")
            case "all":
                return stream.process(_CountsAll(kind, flag), schema=OUT, uid="op")
            case "connected":
                none = stream.filter(pl.col("x") < 0, uid="none").key_by("k")
                return stream.key_by("k").connect(none).process(_Connected(kind, flag), schema=OUT, uid="op")
            case "broadcast":
                broadcast = stream.key_by("k").connect(stream.broadcast())
                return broadcast.process(_Rules(kind, flag), schema=OUT, uid="op")
        windows = stream.assign_timestamps("x", uid="times").key_by("k").window(tg.Tumbling(10)).allowed_lateness(100)
        return windows.process(_Window(kind, flag), schema=pa.schema(list(OUT)[1:]), uid="op")

    return made


def _run(
    folder: Path,
    step: Step,
    restore: str | None = None,
    stop_at: int | None = None,
    savepoint: str = "savepoint",
    parallelism: int = 1,
    restarts: int = 0,
    **settings: Any,
) -> tuple[str, list[dict[str, Any]]]:
    """Run a program until its native savepoint at a gate, or to its end. Returns its path, and the rows at the end."""
    gates = () if stop_at is None else (stop_at,)
    with opening(GatedSource(ROWS, gates=gates)) as source, local(parallelism, 5) as env:
        made = step(env.from_source(source, uid="in", parallelism=1)).collect(uid=f"out {savepoint}")
        if settings.get("backend") == "rocksdb":
            settings = settings | {"backend_directory": folder / "work"}
        job = env.execute(
            "dropping",
            checkpoints=config(folder / "checkpoints", **settings),
            restart=tg.RestartStrategy.fixed_delay(restarts, "10ms") if restarts else NO_RESTART,
            restore=restore,
            allow_non_restored_state=restore is not None,
        )
        if stop_at is not None:
            if restarts:
                until("all tasks run again", lambda: _runs_again([type(event).__name__ for event in job.events()]))
            source.await_gate(stop_at)
            return job.stop(savepoint=str(folder / savepoint), format="native"), []
        assert job.wait("4min") == "finished"
        return "", made.to_arrow().to_pylist()


def _runs_again(events: list[str]) -> bool:
    """Returns whether a task has failed and as many tasks as before are ready again."""
    if "TaskFailed" not in events:
        return False
    last = len(events) - events[::-1].index("TaskFailed")
    return events[last:].count("TaskReady") == events[: events.index("TaskFailed")].count("TaskReady")


def _names(path: str) -> set[str]:
    """The states of the operator in a savepoint."""
    at = parse_pointer(path)
    store, uid = FileSystemStore(at.root), OperatorUid("op")
    metadata = read_pointed(store, at)
    return {table.state for table in stored_columns(store, subtasks_of(metadata, uid), uid)}


SETTINGS: dict[str, dict[str, Any]] = {
    "columnar": {"backend": "columnar"},
    "layers": {"backend": "columnar", "incremental": True, "inline_threshold": 0},
    "rocksdb": {"backend": "rocksdb"},
    "changelog": {"backend": "rocksdb", "changelog": True},
}
TOTALS = {"keyed": ROWS // 5, "all": ROWS, "connected": ROWS // 5, "broadcast": ROWS // 5, "window": ROWS // 10}
"""How many rows or windows each key has at the end, or the one subtask."""
CASES = [
    ("keyed", "value", "columnar", 1),
    ("keyed", "map", "layers", 2),
    ("keyed", "list", "rocksdb", 1),
    ("keyed", "map", "rocksdb", 2),
    ("keyed", "value", "changelog", 1),
    ("all", "list_state", "columnar", 1),
    ("all", "union_list_state", "rocksdb", 1),
    ("connected", "value", "rocksdb", 1),
    ("broadcast", "broadcast", "columnar", 2),
    ("window", "value", "rocksdb", 1),
    ("window", "window value", "layers", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "kind", "backend", "parallelism"), CASES)
def test_a_state_is_dropped_with_consent(tmp_path: Path, shape: str, kind: str, backend: str, parallelism: int) -> None:
    """Also by an attempt after a failure before the first checkpoint. A later program begins with none of it."""
    settings, flag = SETTINGS[backend], tmp_path / "failed"
    first, _ = _run(tmp_path, _step(shape, kind), stop_at=GATE, **settings)
    assert "m" in _names(first)

    without = _step(shape, None, flag)
    before = sorted(str(found) for found in tmp_path.rglob("*"))
    with local(1, 5) as env:
        without(env.from_source(GatedSource(ROWS), uid="in", parallelism=1)).collect(uid="out refused")
        refused, report = env.check_restore(first), env.check_restore(first, allow_non_restored_state=True)
        with pytest.raises(
            tg.IncompatibleStateError, match="drop the state with allow_non_restored_state=True"
        ) as told:
            env.execute("dropping", checkpoints=config(tmp_path / "checkpoints"), restore=first)
    assert refused.refused == str(told.value)
    assert "'m' that the function does not bind" in str(told.value)
    assert (report.ok, report.dropped) == (True, ("op: state m",))
    assert before == sorted(str(found) for found in tmp_path.rglob("*"))

    second, _ = _run(
        tmp_path,
        without,
        restore=first,
        stop_at=SECOND_GATE,
        savepoint="second",
        parallelism=parallelism,
        restarts=1,
        **settings,
    )
    assert flag.exists(), "the job did not fail"
    assert {"n"} <= _names(second)
    assert "m" not in _names(second)

    _, rows = _run(tmp_path, _step(shape, kind), restore=second, savepoint="third", **settings)
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["n"]):
        groups.setdefault(0 if shape == "all" else row["x"] % 5, []).append(row)
    for found in groups.values():
        counted = range(1, len(found) + 1)
        assert [row["n"] for row in found] == list(range(TOTALS[shape] - len(found) + 1, TOTALS[shape] + 1))
        if shape == "broadcast":
            assert all(row["m"] <= len(rows) for row in found)
        else:
            assert [row["m"] for row in found] == ([1] * len(found) if kind == "window value" else list(counted))
    assert len(rows) < TOTALS[shape] * (1 if shape == "all" else 5)


def _files(folder: Path) -> list[str]:
    return sorted(str(found) for found in folder.rglob("*") if found.is_file())


class _Glitch:
    """One read of the checkpoint's metadata fails before the job is submitted: the one of this number."""

    def __init__(self, number: int) -> None:
        self.number, self.reads = number, 0

    def open_store(self, url: str) -> FileSystemStore:
        """A store that fails when it is its turn."""
        return _Glitching(url, self)


class _Glitching(FileSystemStore):
    def __init__(self, url: str, glitch: _Glitch) -> None:
        super().__init__(url)
        self._glitch = glitch

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read a file."""
        if path.endswith("_metadata"):
            self._glitch.reads += 1
            if self._glitch.reads == self._glitch.number:
                raise tg.StorageError("the storage was away for a moment")
        return super().read(path, offset, length)


@pytest.mark.slow
@pytest.mark.parametrize("agrees", [True, False], ids=["with consent", "without"])
def test_a_read_that_fails_once_loses_no_consent(tmp_path: Path, agrees: bool) -> None:
    """Whichever read of the submission fails: the job drops the state as agreed, or it is refused at submission."""
    savepoint, _ = _run(tmp_path, _step("keyed", "value"), stop_at=GATE)
    before = _files(tmp_path)
    outcomes = []
    for number in range(1, 100):
        glitch = _Glitch(number)
        with tg.StreamEnvironment(LocalRuntime(FileSystemStore), 1, open_store=glitch.open_store) as env:
            _step("keyed", None)(env.from_source(GatedSource(ROWS), uid="in", parallelism=1)).to_table(
                str(tmp_path / "out"), uid="out", if_exists="append"
            )
            try:
                job = env.execute(
                    "dropping",
                    checkpoints=config(tmp_path / "checkpoints"),
                    restart=NO_RESTART,
                    restore=savepoint,
                    allow_non_restored_state=agrees,
                )
            except tg.TidegateError as error:
                outcomes.append(type(error))
                assert agrees or before == _files(tmp_path)
            else:
                outcomes.append(None)
                assert job.wait("4min") == "finished"
        if glitch.reads < number:
            break
    assert set(outcomes) <= ({None, tg.StorageError} if agrees else {tg.IncompatibleStateError, tg.StorageError})
    assert outcomes[-1] is (None if agrees else tg.IncompatibleStateError)
    assert len(outcomes) > 2, "the metadata was not read in several places"
