"""Functions whose states change between a savepoint and its restore: refused at `execute`, or converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, config, local, opening

import tidegate as tg

ROWS, GATE = 60, 37
OUT = pa.schema([("k", pa.int64()), ("n", pa.int64())])
INT = pa.int64()
Step = Callable[[Any], Any]
Bind = Callable[[Any], list[Any]]


class _Function(tg.ProcessFunction):
    """Counts rows in the first of the states that `bind` declares, and puts something into the others."""

    def __init__(self, bind: Bind) -> None:
        self.bind = bind

    def open(self, context: tg.ProcessContext) -> None:
        self.states = self.bind(context)

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        for state in self.states:
            _touch(state)
        first = self.states[0].value() if isinstance(self.states[0], tg.ValueState) else None
        yield {"k": row["k"], "n": first if isinstance(first, int) else 0}


def _touch(state: Any) -> None:
    """Add one to a number, or one element to what holds several."""
    value = {pa.string(): "x", pa.float64(): 1.0}.get(state._typed.dtype, 1)
    if isinstance(state, tg.ValueState):
        state.update(value if isinstance(value, str) else (state.value() or 0) + value)
    elif isinstance(state, tg.MapState):
        state.put("entry", value)
    else:
        state.add(value)


def _keyed(*states: Any) -> Step:
    """A keyed step whose function binds these states."""

    def bind(context: Any) -> list[Any]:
        return [context.state(state) for state in states]

    return lambda stream: stream.key_by("k").process(_Function(bind), schema=OUT, uid="op")


def _value(name: str = "n", dtype: Any = INT, **more: Any) -> tg.ValueState:
    return tg.ValueState(name, dtype, **more)


def _list(kind: str, dtype: Any = INT) -> Step:
    """A step without keys whose function binds a list of the subtask."""

    def bind(context: Any) -> list[Any]:
        return [getattr(context, kind)(tg.ListState("seen", dtype))]

    return lambda stream: stream.process(_Function(bind), schema=OUT, uid="op")


def _keyed_list(name: str) -> Step:
    """A keyed step whose function binds a list of the subtask."""

    def bind(context: Any) -> list[Any]:
        return [context.list_state(tg.ListState(name, INT))]

    return lambda stream: stream.key_by("k").process(_Function(bind), schema=OUT, uid="op")


class _Connected(tg.CoProcessFunction):
    """Counts the rows of both inputs."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def open(self, context: tg.ProcessContext) -> None:
        self.n = context.state(tg.ValueState("n", self.dtype))

    def process1(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
        _touch(self.n)

    process2 = process1


class _Rules(tg.KeyedBroadcastProcessFunction):
    """Keeps the rows of the broadcast side in a map, and a number for each key."""

    def __init__(self, rule: Any, number: Any = INT) -> None:
        self.rule, self.number = rule, number

    def open(self, context: tg.ProcessContext) -> None:
        self.rules = context.broadcast_state(tg.MapState("rules", pa.int64(), self.rule))
        self.n = context.state(tg.ValueState("n", self.number))

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
        _touch(self.n)

    def process_broadcast(self, row: dict[str, Any], context: Any) -> None:
        self.rules.put(row["x"], "rule" if self.rule == pa.string() else 1)


class _Window(tg.ProcessWindowFunction):
    """Counts the windows of a key."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def open(self, context: Any) -> None:
        self.n = context.state(tg.ValueState("n", self.dtype))

    def process(self, rows: Any, context: Any) -> dict[str, Any]:
        _touch(self.n)
        return {"n": 1}


def _connected(dtype: Any) -> Step:
    return lambda stream: (
        stream.key_by("k").connect(stream.key_by("k")).process(_Connected(dtype), schema=OUT, uid="op")
    )


def _rules(rule: Any, number: Any = INT) -> Step:
    return lambda stream: (
        stream.key_by("k").connect(stream.broadcast()).process(_Rules(rule, number), schema=OUT, uid="op")
    )


class _TimedWindow(_Window):
    """Registers a timer for each window."""

    def process(self, rows: Any, context: Any) -> dict[str, Any]:
        context.timer_service.register_event_time_timer(context.window.end_ms + 20)
        return super().process(rows, context)

    def on_timer(self, timestamp: int, context: Any) -> None:
        """Nothing to emit."""


class _Timed(_Function):
    """Registers a timer for each key."""

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        context.timer_service.register_event_time_timer(10**9)
        yield from super().process(row, context)

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> None:
        """Nothing to emit."""


class _BatchFunction(tg.ProcessFunction):
    """Processes batches, without a method for timers."""

    def open(self, context: tg.ProcessContext) -> None:
        self.n = context.state(_value())

    def process_batch(self, batch: pa.RecordBatch, context: tg.ProcessBatchContext) -> None:
        """Nothing to emit."""


def _timed(function: Callable[[], tg.ProcessFunction]) -> Step:
    return lambda stream: stream.key_by("k").process(function(), schema=OUT, uid="op")


def _number(context: Any) -> list[Any]:
    return [context.state(_value())]


def _window(dtype: Any, function: type[_Window] = _Window) -> Step:
    return lambda stream: (
        stream.assign_timestamps("x")
        .key_by("k")
        .window(tg.Tumbling(10))
        .allowed_lateness(100)
        .process(function(dtype), schema=pa.schema([("n", pa.int64())]), uid="op")
    )


def _run(folder: Path, step: Step, restore: str | None, backend: str) -> tuple[str, list[dict[str, Any]]]:
    """Run a program until its savepoint at the gate, or from a savepoint to its end. Returns its path, or its rows."""
    gates = (GATE,) if restore is None else ()
    with opening(GatedSource(ROWS, gates=gates)) as source, local(1, 5) as env:
        made = step(env.from_source(source, uid="in")).collect(uid="out" if restore is None else "out again")
        checkpoints = config(folder / "checkpoints", backend=backend)
        job = env.execute("changing", checkpoints=checkpoints, restart=NO_RESTART, restore=restore)
        if restore is None:
            source.await_gate(GATE)
            return job.stop(savepoint=str(folder / "savepoint")), []
        assert job.wait("4min") == "finished"
        return "", made.to_arrow().to_pylist()


def _refusal(folder: Path, step: Step, path: str, allow: bool = True) -> str:
    """The error of a program that cannot go on from a savepoint, which `check_restore` reports as well."""
    before = sorted(str(found) for found in folder.rglob("*"))
    with local(1, 5) as env:
        step(env.from_source(GatedSource(ROWS), uid="in")).collect(uid="out again")
        report = env.check_restore(path, allow_non_restored_state=allow)
        with pytest.raises(tg.IncompatibleStateError) as refused:
            env.execute(
                "changing",
                checkpoints=config(folder / "checkpoints"),
                restore=path,
                allow_non_restored_state=allow,
            )
    assert before == sorted(str(found) for found in folder.rglob("*")), "a refusal has changed something"
    assert report.refused == str(refused.value)
    assert "op" not in report.restored
    return str(refused.value)


HOUR = tg.StateTtl("1h")
REFUSED: list[tuple[Step, Step, str]] = [
    (_keyed(_value()), _keyed(_value(dtype=pa.string())), "'n' as int64, and the program expects string"),
    (_keyed(_value(dtype=pa.float64())), _keyed(_value()), "double cannot become int64"),
    (_keyed(_value()), _keyed(tg.ListState("n", pa.int64())), "'n' as int64, and the program expects list"),
    (_keyed(_value()), _keyed_list("n"), "state 'n' that the function does not bind"),
    (_keyed(_value(ttl=HOUR)), _keyed(_value()), "was written with a time to live"),
    (_list("list_state"), _list("list_state", pa.string()), "int64 cannot become string"),
    (_list("list_state"), _list("union_list_state"), "was stored as list state"),
    (_keyed(_value()), _list("list_state"), "process without keys"),
    (_connected(pa.int64()), _connected(pa.string()), "int64 cannot become string"),
    (_rules(pa.string()), _rules(pa.int64()), "string cannot become int64"),
    (_rules(pa.string()), _rules(pa.string(), pa.string()), "int64 cannot become string"),
    (_window(pa.int64()), _window(pa.string()), "int64 cannot become string"),
    (_window(pa.int64(), _TimedWindow), _window(pa.int64()), "the function no longer has a method on_timer"),
    (_timed(lambda: _Timed(_number)), _keyed(_value()), "pending timers, and _Function has no method on_timer"),
    (
        _timed(lambda: _Timed(_number)),
        _timed(_BatchFunction),
        "has no method on_timer_batch or on_timer, so",
    ),
]
"""An old program, a new one, and what the error says, whatever the user agrees to drop."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["columnar", "rocksdb"])
@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_states_that_do_not_fit_are_refused_before_a_start(tmp_path: Path, backend: str, number: int) -> None:
    """`execute` and `check_restore` report it with one text, nothing on disk changes, and the old program restores."""
    old, new, said = REFUSED[number]
    path, _ = _run(tmp_path, old, None, backend)
    assert said in _refusal(tmp_path, new, path)
    _run(tmp_path, old, path, backend)


@pytest.mark.slow
def test_all_states_of_a_function_are_listed(tmp_path: Path) -> None:
    """One error has each of them."""
    path, _ = _run(tmp_path, _keyed(_value(), _value("m"), _value("o")), None, "columnar")
    text = _refusal(tmp_path, _keyed(_value(dtype=pa.string()), _value("o")), path, allow=False)
    assert text.startswith("2 things in the program do not fit")
    assert "'n' as int64" in text
    assert "state 'm' that the function does not bind" in text


@pytest.mark.slow
def test_another_event_time_is_one_problem(tmp_path: Path) -> None:
    """The step that assigns it reports the change, and the window behind it does not repeat it."""

    def timed(factor: int, width: int = 10) -> Step:
        return lambda stream: (
            stream.assign_timestamps(pl.col("x") * factor, uid="times")
            .key_by("k")
            .window(tg.Tumbling(width))
            .aggregate(n=tg.count(), uid="op")
        )

    path, _ = _run(tmp_path, timed(2), None, "columnar")
    text = _refusal(tmp_path, timed(3), path)
    assert text.startswith("operator 'times' ('assign_timestamps') at ")
    assert "has time expression (x Multiply 2), and the program time expression (x Multiply 3)" in text
    assert _refusal(tmp_path, timed(3, width=20), path).startswith("2 things in the program")


@pytest.mark.slow
def test_a_wrong_setting_is_not_blamed_on_the_checkpoint(tmp_path: Path) -> None:
    """The function would refuse to open without state as well, so no other state helps."""

    def bind(context: Any) -> list[Any]:
        return [context.state(tg.ValueState("n", INT, ttl="1h"))]  # type: ignore[arg-type]

    path, _ = _run(tmp_path, _keyed(_value()), None, "columnar")
    with local(1, 5) as env:
        wrong = env.from_source(GatedSource(ROWS), uid="in").key_by("k").process(_Function(bind), schema=OUT, uid="op")
        wrong.collect(uid="out again")
        for refused in (
            lambda: env.check_restore(path),
            lambda: env.execute("changing", checkpoints=config(tmp_path / "checkpoints"), restore=path),
        ):
            with pytest.raises(tg.ConfigurationError, match=r"^operator 'op' .*: state 'n': ttl is a") as said:
                refused()
            assert not isinstance(said.value, tg.IncompatibleStateError)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["columnar", "rocksdb"])
def test_states_are_added_and_widen(tmp_path: Path, backend: str) -> None:
    """The report names them, and the job counts on."""
    path, _ = _run(tmp_path, _keyed(_value(dtype=pa.int32())), None, backend)
    new = _keyed(_value(), _value("m", ttl=HOUR))
    with local(1, 5) as env:
        new(env.from_source(GatedSource(ROWS), uid="in")).collect(uid="out again")
        report = env.check_restore(path)
    assert (report.ok, report.migrated, report.started_empty) == (True, ("op: state n",), ("op: state m",))
    _, rows = _run(tmp_path, new, path, backend)
    assert max(row["n"] for row in rows) == ROWS // 5


class _Elsewhere(_Function):
    """A function whose `open` works in a task alone."""

    def open(self, context: tg.ProcessContext) -> None:
        if self.fails[0]:
            raise RuntimeError("there is no such machine here")
        super().open(context)

    fails: ClassVar[list[bool]] = [False]


@pytest.mark.slow
def test_a_function_that_cannot_be_opened_here_is_compared_by_its_task(tmp_path: Path) -> None:
    """Neither `check_restore` nor `execute` fails where `open` does, and the job ends without a restart."""

    def step(dtype: Any) -> Step:
        function = _Elsewhere(lambda context: [context.state(_value(dtype=dtype))])
        return lambda stream: stream.key_by("k").process(function, schema=OUT, uid="op")

    path, _ = _run(tmp_path, step(pa.int64()), None, "columnar")
    with local(1, 5) as env:
        step(pa.string())(env.from_source(GatedSource(ROWS), uid="in")).collect(uid="out again")
        _Elsewhere.fails[0] = True
        try:
            assert env.check_restore(path).ok
        finally:
            _Elsewhere.fails[0] = False
