"""Functions that capture what cannot travel to a task are named, with the step, before anything starts."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from programs import nodes_of

import tidegate as tg
from tidegate.api.submission.program_checks import check_captures

_X = pa.schema({"x": pa.int64()})


def _locked() -> Callable[[dict[str, Any]], dict[str, Any]]:
    lock = threading.Lock()

    def guarded(row: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return row

    return guarded


def _session() -> Callable[[dict[str, Any]], dict[str, Any]]:
    class Session:
        def __reduce__(self) -> Any:
            raise RuntimeError("only on the driver")

    tools = {"spark": Session()}
    return lambda row: {"x": len(str(tools["spark"]))}


def _pooled() -> Callable[[dict[str, Any]], Any]:
    pool = ThreadPoolExecutor(1)

    async def asks(row: dict[str, Any]) -> dict[str, Any]:
        return await asyncio.get_running_loop().run_in_executor(pool, dict, row)

    return asks


STEPS: dict[str, tuple[Callable[[tg.Stream], tg.Stream], str]] = {
    "lock": (lambda s: s.map(_locked(), schema=_X, uid="step"), "captures lock, a _thread.lock"),
    "session": (lambda s: s.map(_session(), schema=_X, uid="step"), r"captures tools\.spark, a .*Session"),
    "calls": (
        lambda s: s.map_async(_pooled(), schema=_X, uid="step"),
        r"captures pool\._work_queue, a _queue.SimpleQueue.*\n.*functools\.cache that the first call of map_async",
    ),
    "traced": (lambda s: s.filter(_locked(), uid="step"), "captures lock, a _thread.lock"),
}


@pytest.mark.parametrize("step", STEPS)
def test_what_a_function_captures_is_named(step: str, caplog: pytest.LogCaptureFixture) -> None:
    """Refused where tasks are in other processes; a warning, in three lines, where they are in this one."""
    made, words = STEPS[step]
    with tg.StreamEnvironment.local(1) as env:
        made(env.from_batches(pa.table({"x": [1]}))).collect()
        nodes = nodes_of(env)
        with pytest.raises(tg.ConfigurationError, match=words) as refused:
            check_captures(nodes, refuse=True)
        assert "(uid 'step')" in str(refused.value)
        assert str(refused.value).count("\n") == 2
        with caplog.at_level(logging.WARNING):
            assert env.execute("captures", progress="off").wait() == "finished"
    assert "(uid 'step') cannot be sent to its tasks" in caplog.text


def test_what_travels_is_not_reported() -> None:
    """Also large data and modules."""
    data = list(range(1_000))
    with tg.StreamEnvironment.local(1) as env:
        env.from_batches(pa.table({"x": [1]})).map(lambda row: {"x": row["x"] + len(data)}, schema=_X).collect()
        check_captures(nodes_of(env), refuse=True)
