"""Runs of several processes deal tests out so that what is expensive is made once, however they are asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import spreading

CONFTEST = """
import spreading

def pytest_configure(config):
    config.pluginmanager.register(spreading, "spreading")

def pytest_collection_modifyitems(config, items):
    for item in items:
        item.user_properties.append(("kind", "unit"))
    spreading.spread(config, items)
"""
MODULE = """
import os
import pytest

@pytest.fixture(scope="module")
def expensive(tmp_path_factory):
    with open("made", "a") as file:
        print(os.getpid(), file=file)

@pytest.mark.parametrize("number", range(6))
def test_of_the_module(expensive, number): pass

@pytest.mark.parametrize("number", range(6))
def test_of_its_own(number): pass
"""


def run_of(folder: Path, module: str, *words: str) -> None:
    """Runs the tests of a module in a folder of its own. All must pass."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_module.py").write_text(module)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest", "-p", "no:cacheprovider", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(spreading.__file__).parent), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "passed" in run.stdout


def times_made(folder: Path, *words: str) -> int:
    """Returns how often two processes made the fixture of a module."""
    run_of(folder, MODULE, "-n", "2", *words)
    return len((folder / "made").read_text().splitlines())


@pytest.mark.slow
def test_two_processes_keep_a_module_together(tmp_path: Path) -> None:
    """`pytest -n 2` makes the fixture of a module once, as `make test` does."""
    assert times_made(tmp_path) == 1


@pytest.mark.slow
def test_a_way_of_dealing_that_is_not_ours_runs(tmp_path: Path) -> None:
    """Where xdist deals the tests out itself, nothing waits for what nobody has told."""
    assert times_made(tmp_path, "--dist", "worksteal") in {1, 2}


SERVER = """
import pytest

@pytest.fixture(scope="session")
def s3_server():
    with open("events", "a") as file:
        print("start", file=file)
    yield
    with open("events", "a") as file:
        print("end", file=file)

@pytest.mark.parametrize("number", range(2))
def test_with_it(s3_server, number): pass

def test_without_it():
    assert open("events").read().split() == ["start", "end"]
"""


@pytest.mark.slow
def test_a_server_ends_after_the_last_test_that_shares_it(tmp_path: Path) -> None:
    """Not after the whole run, in which it would compute for as long as there are other tests."""
    run_of(tmp_path, SERVER, "-n", "1")
    assert (tmp_path / "events").read_text().split() == ["start", "end"]


STORE = """
import os
import pytest

@pytest.fixture(scope="session")
def hdfs_server():
    with open("made", "a") as file:
        print(os.getpid(), file=file)

@pytest.fixture(params=["local", "hdfs"])
def store(request):
    if request.param == "hdfs":
        request.getfixturevalue("hdfs_server")

@pytest.mark.parametrize("number", range(6))
def test_of_each_store(store, number): pass
"""


@pytest.mark.slow
def test_two_processes_start_one_server_for_a_kind_of_stores(tmp_path: Path) -> None:
    """Also where a fixture with the name of the store requests the server."""
    run_of(tmp_path, STORE, "-n", "2")
    assert len((tmp_path / "made").read_text().splitlines()) == 1


ORDER = """
import pytest

def done(name):
    with open("done", "a") as file:
        print(name, file=file)

def test_quick(): done("quick")

@pytest.mark.slow
def test_slow(): done("slow")

def test_of_a_server(s3_server): done("server")

@pytest.fixture(scope="session")
def s3_server(): pass
"""


@pytest.mark.slow
def test_long_tests_come_first(tmp_path: Path) -> None:
    """Servers come first, then slow tests, then quick ones, so that every process has work until the end."""
    run_of(tmp_path, ORDER, "-n", "1")
    assert (tmp_path / "done").read_text().split() == ["server", "slow", "quick"]
