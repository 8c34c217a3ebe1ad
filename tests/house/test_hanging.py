"""A test that hangs fails alone, with the stacks of all threads, and one whose thread has died does not hang."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hanging
import pytest

CONFTEST = """
import hanging

def pytest_configure(config):
    config.pluginmanager.register(hanging, "hanging")
"""
MODULE = """
import signal
import threading

import hanging
import pytest
from waiting import received, until
from queue import SimpleQueue

def nobody_ends_this(event):
    event.wait()

def die():
    raise LookupError("a fake lacks an argument")

def the_limit_is_over():
    signal.setitimer(signal.ITIMER_REAL, 0.1)

def test_hangs():
    threading.Thread(target=nobody_ends_this, args=[threading.Event()], name="other", daemon=True).start()
    the_limit_is_over()
    threading.Event().wait()

def test_after_it(): pass

@pytest.fixture
def hangs():
    the_limit_is_over()
    threading.Event().wait()

def test_fixture_hangs(hangs): pass

def test_waits_after_a_death():
    threading.Thread(target=die, name="dead").start()
    until("an answer", lambda: False, after_failure=True)

def test_receives_after_a_death():
    threading.Thread(target=die, name="dead").start()
    received("an answer", SimpleQueue())

def test_blocks_after_a_death(monkeypatch):
    monkeypatch.setattr(hanging, "AFTER_DEATH_S", 0.1)
    threading.Thread(target=die, name="dead").start()
    threading.Event().wait()

def test_after_all(): until("nothing", lambda: True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("-n", "1")], ids=["one process", "workers"])
def test_what_hangs_fails_alone(tmp_path: Path, words: tuple[str, ...]) -> None:
    """The error of a test shows the stack of each thread, and names the thread that has died."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_module.py").write_text(MODULE)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest", "-p", "no:cacheprovider", "-rA", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(hanging.__file__).parent), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.split(" - ")[0].replace("test_module.py::test_", "") for line in run.stdout.splitlines()]
    kinds = {kind: {line.split()[1] for line in lines if line.startswith(f"{kind} ")} for kind in ("PASSED", "FAILED")}
    assert kinds["PASSED"] == {"after_it", "after_all"}, run.stdout + run.stderr
    died = {"blocks_after_a_death", "waits_after_a_death", "receives_after_a_death"}
    assert kinds["FAILED"] == {"hangs", *died}
    assert "ERROR fixture_hangs" in lines
    assert f"ended because it hangs: it is in its call after {hanging.LIMIT_S:g} s" in run.stdout
    assert f"ended because it hangs: it is in its set-up after {hanging.LIMIT_S:g} s" in run.stdout
    others = [text for text in run.stdout.split("--- thread ") if text.startswith("other ---")]
    assert "in nobody_ends_this" in others[0]
    assert "ended because it hangs: thread dead has died" in run.stdout
    assert run.stdout.count("waited in vain for an answer: thread dead has died") >= 2
