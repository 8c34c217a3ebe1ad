"""Tests wait for events, not for time, and not for what cannot happen any more.

Nothing joins a Ray that happens to run on the machine.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import cloudpickle
import pytest
import waiting
from repository import ROOT, files
from waiting import LIMIT_S, received, until, watched

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.units import parse_duration_ms

TESTS = ROOT / "tests"
WAITING = TESTS / "support" / "waiting.py"
LIMITED = re.compile(r"""(?:timeout=|(?:wait|join|result|settimeout)\()["'\d]""")
"""Where a wait with a written limit may be."""
MEANT_S = 1.0
"""A shorter limit is meant to be over."""
CLOCKS = {
    "time.monotonic",
    "time.monotonic_ns",
    "time.perf_counter",
    "time.perf_counter_ns",
    "time.time",
    "time.time_ns",
}


def calls(source: str, *words: str) -> Iterator[tuple[str, ast.Call]]:
    """The name of what is called, as it is written, and the call; nothing where no word occurs: reading costs time."""
    for node in ast.walk(ast.parse(source if any(word in source for word in words) else "")):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield ast.unparse(node.func), node


def sleeps(source: str) -> list[int]:
    """Lines that let time pass."""
    return [call.lineno for name, call in calls(source, "sleep") if name.rpartition(".")[2] == "sleep"]


def clocks(source: str) -> list[int]:
    """Lines that ask what time it is."""
    return [call.lineno for name, call in calls(source, *CLOCKS) if name in CLOCKS]


def joining(source: str) -> list[int]:
    """Lines that start Ray or join one, and do not say which."""
    found = [
        (call.lineno, [word.arg for word in call.keywords])
        for name, call in calls(source, "ray.init")
        if name == "ray.init"
    ]
    return [line for line, words in found if "address" not in words]


def impatient(source: str) -> list[int]:
    """Lines that give up after a while that a busy machine may need. Up to a second is no while: nothing is awaited."""
    found = []
    for name, call in calls(source, *LIMITED.findall(source)):
        method = name.rpartition(".")[2]
        limits = [word.value for word in call.keywords if word.arg == "timeout" and not method.endswith("Config")]
        if method in {"wait", "join", "result", "settimeout"}:
            limits += call.args[:1]
        values = [limit.value for limit in limits if isinstance(limit, ast.Constant)]
        if any(MEANT_S < seconds(value) < LIMIT_S for value in values):
            found.append(call.lineno)
    return found


def seconds(value: object) -> float:
    """A limit as it is written, a number or a duration; what is neither is none."""
    if isinstance(value, str):
        try:
            return parse_duration_ms(value, setting="limit") / 1_000
        except ConfigurationError:
            return 0.0
    return float(value) if isinstance(value, int | float) else 0.0


def offences(check: object, paths: list[Path]) -> list[str]:
    """`file:line` of each line that a check finds."""
    assert callable(check)
    return [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in check(path.read_text())]


def python_files() -> list[Path]:
    """All of ours, tests and scripts included."""
    return [path for path in files() if path.suffix == ".py"]


def test_no_test_waits_for_time_to_pass() -> None:
    """A test that sleeps is slow on a quiet machine and fails on a busy one: see `waiting.until`."""
    tests = [path for path in python_files() if path.is_relative_to(TESTS) and path != WAITING]
    assert offences(sleeps, tests) == []
    assert offences(clocks, tests) == []


@pytest.mark.slow
def test_no_test_gives_up_before_a_busy_machine_does() -> None:
    """Whoever waits for an event does so for as long as `waiting.LIMIT_S`: the limit only ends a wait in vain."""
    assert offences(impatient, [path for path in python_files() if path.is_relative_to(TESTS)]) == []


def test_nobody_joins_whatever_ray_there_is() -> None:
    """Without an address `ray.init` joins the cluster that it last saw on the machine, which is somebody else's."""
    assert offences(joining, python_files()) == []


@pytest.mark.parametrize(
    ("check", "line"),
    [
        (sleeps, "time.sleep(1)"),
        (sleeps, "await asyncio.sleep(0.1)"),
        (sleeps, "sleep(1)"),
        (clocks, "assert time.monotonic() - started < 20"),
        (impatient, "assert done.wait(60)"),
        (impatient, 'job.wait("1min")'),
        (impatient, "thread.join(timeout=30)"),
        (impatient, "answers.get(timeout=5.0)"),
        (joining, "ray.init(num_cpus=1)"),
        (joining, "ray.init(**options)"),
    ],
)
def test_offences_are_recognised(check: object, line: str) -> None:
    """The rules bite."""
    assert callable(check)
    assert check(f"async def f():\n    {line}\n") == [2]


def test_what_is_allowed_is_allowed() -> None:
    """Waiting for an event with a limit, and a Ray that is named."""
    source = 'until("it", happened)\nevent.wait(240)\nray.init(address="local", num_cpus=1)\n'
    source += 'job.wait("4min")\njob.wait("1ms")\n", ".join(names)\n'
    assert sleeps(source) + clocks(source) + joining(source) + impatient(source) == []


class Part:
    """Something under watch, and a condition that becomes true when it was looked at so often."""

    def __init__(self, failure: str | None, true_at: int | None = None) -> None:
        self.looks = 0
        self._failure, self._true_at = failure, true_at
        watched.add(self.failure)

    def failure(self) -> str | None:
        """Why it has failed."""
        return self._failure

    def happened(self) -> bool:
        """Returns whether the condition was checked often enough."""
        self.looks += 1
        return self.looks == self._true_at


def test_a_wait_in_vain_ends_with_the_failure() -> None:
    """The condition is evaluated once more after it."""
    part = Part("the fake is broken")
    with pytest.raises(AssertionError, match="waited in vain for it: the fake is broken\nseen: as much"):
        until("it", part.happened, lambda: "as much")
    assert part.looks == 2
    with pytest.raises(AssertionError, match="the fake is broken"):
        received("it", SimpleQueue())


@pytest.mark.parametrize(("failure", "true_at"), [("broken", 1), ("broken", 2), (None, 20)])
def test_what_happens_in_time_is_no_failure(failure: str | None, true_at: int) -> None:
    """Neither before the failure was seen, nor at the same moment, nor where there is none."""
    until("it", Part(failure, true_at).happened)


def test_a_test_may_wait_for_what_follows_from_a_failure() -> None:
    """It says so, or has been told of the failure."""
    part = Part("broken", 20)
    until("it", part.happened, after_failure=True)
    part = Part("broken", 20)
    watched.clear()
    watched.add(part.failure)
    watched.remove(part.failure)
    until("it", part.happened)


def test_threads_of_fakes_wait_on() -> None:
    """A failure ends the test, not what runs beside it."""
    part = Part("broken", 20)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(until, "it", part.happened).result()


def by_value(function: Any) -> bytes:
    """A function of `waiting` for a process that cannot import that module."""
    cloudpickle.register_pickle_by_value(waiting)
    try:
        sent: bytes = cloudpickle.dumps(function)
        return sent
    finally:
        cloudpickle.unregister_pickle_by_value(waiting)


def test_a_wait_can_be_sent_to_a_process_of_a_job() -> None:
    """The wait reports no failure where nothing is under watch."""
    cannot_be_sent = threading.Lock()
    watched.add(lambda: f"broken: {cannot_be_sent}")
    sent = subprocess.run(
        [sys.executable, "-c", "import pickle, sys; pickle.load(sys.stdin.buffer)('it', lambda: True)"],
        input=by_value(until),
        check=False,
        capture_output=True,
    )
    assert sent.returncode == 0, sent.stderr
