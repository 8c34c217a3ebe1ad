"""A run names the tests that take longer than quick tests may."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import processor_time
import pytest

CONFTEST = """
import processor_time

processor_time.LIMIT_S = 0.15

def pytest_configure(config):
    config.pluginmanager.register(processor_time, "processor_time")
    config.addinivalue_line("markers", "slow: long")

def pytest_collection_modifyitems(items):
    for item in items:
        item.user_properties.append(("kind", "property" if "other" in item.name else "unit"))
"""
MODULE = """
import subprocess
import sys
import threading
import pytest

SPEND = "import time; until = time.process_time() + 0.2\\nwhile time.process_time() < until: pass"

@pytest.fixture
def made():
    exec(SPEND)

@pytest.fixture(scope="session")
def shared():
    exec(SPEND)
    yield
    subprocess.run([sys.executable, "-c", SPEND], check=True)

def test_with_a_fixture(made): pass
def test_with_a_child(): subprocess.run([sys.executable, "-c", SPEND], check=True)
def test_of_a_session(shared): pass
def test_that_waits(): threading.Event().wait(0.3)
@pytest.mark.slow
def test_that_is_marked(made): pass
def test_of_another_kind(made): pass
def test_that_ends_the_session(): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("-n", "1")], ids=["one process", "workers"])
def test_what_is_over_the_limit_is_named(tmp_path: Path, words: tuple[str, ...]) -> None:
    """With its fixtures and the programs that it runs; not what only waits, is marked, or is of no quick kind.

    The time of a session's fixture counts for no test, neither for the first nor for the last one.
    """
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_module.py").write_text(MODULE)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest", "-p", "no:cacheprovider", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(processor_time.__file__).parent), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    named = {line.split("::")[1] for line in run.stdout.splitlines() if "::" in line}
    assert named == {"test_with_a_fixture", "test_with_a_child"}


def report(test: str, seconds: float, kind: str = "unit", *marks: str) -> pytest.TestReport:
    """What is said of a phase of a test."""
    told = [("kind", kind), ("processor_s", seconds)]
    keywords = dict.fromkeys(marks, 1)
    return pytest.TestReport(test, (test, 0, test), keywords, "passed", None, "call", user_properties=told)


def test_phases_are_added_up() -> None:
    """The longest comes first."""
    long = processor_time.LIMIT_S + 0.1
    half = long / 2
    reports = [report("a", half), report("b", long + 1), report("a", half), report("c", half)]
    assert list(processor_time.over_limit(reports)) == ["b", "a"]
    others = [report("d", long, "unit", "slow"), report("e", long, "property")]
    assert processor_time.over_limit(others) == {}
