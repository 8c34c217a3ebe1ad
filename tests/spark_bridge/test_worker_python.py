"""What Spark cannot run tidegate's code in is refused by its name, without Spark."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidegate.spark_bridge.worker_python import refuse_connect, refuse_other_python, refuse_unfit_workers
from tidegate.storage.errors import ConfigurationError

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def python_of(folder: Path, answer: str) -> str:
    """A Python that gives this answer, whatever it is asked."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o700)
    return str(program)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("2.7 0.1.0", f"Python 2.7, and this program runs on {HERE}"),
        (f"{HERE} none", "which has no tidegate"),
        (f"{HERE} 0.0.1", r"which has tidegate 0\.0\.1"),
        ("", "which does not start"),
    ],
)
def test_another_python_is_named(tmp_path: Path, answer: str, text: str) -> None:
    """With the setting, and the Python that it should be."""
    with pytest.raises(ConfigurationError, match=rf"from_dataframe: .*{text}.*PYSPARK_PYTHON={sys.executable}"):
        refuse_other_python(python_of(tmp_path, answer), "from_dataframe")


def test_a_python_that_is_not_there_is_named(tmp_path: Path) -> None:
    """As where `python3` is not on the path."""
    with pytest.raises(ConfigurationError, match="which does not start"):
        refuse_other_python(str(tmp_path / "nowhere"), "table.read")


def test_the_same_python_is_taken(tmp_path: Path) -> None:
    """This one, and another one with the same versions."""
    refuse_other_python(sys.executable, "from_dataframe")
    refuse_other_python(python_of(tmp_path, f"{HERE} {version('tidegate')}"), "from_dataframe")


def session(master: str, python: str) -> Any:
    """A SparkSession whose workers run a Python."""
    return SimpleNamespace(sparkContext=SimpleNamespace(master=master, pythonExec=python))


def test_only_workers_of_this_machine_are_looked_at(tmp_path: Path) -> None:
    """The paths of other machines say nothing here."""
    other = python_of(tmp_path, "2.7 none")
    refuse_unfit_workers(session("yarn", other), "from_dataframe")
    with pytest.raises(ConfigurationError, match=r"Python 2\.7"):
        refuse_unfit_workers(session("local[2]", other), "from_dataframe")


def test_spark_connect_is_refused_at_once() -> None:
    """Nothing of it is asked for: its own errors name attributes of the JVM."""
    of_connect = type("DataFrame", (), {"__module__": "pyspark.sql.connect.dataframe"})
    with pytest.raises(
        ConfigurationError, match=r"from_dataframe: .*connect\.dataframe\.DataFrame is of Spark Connect"
    ):
        refuse_connect(of_connect(), "from_dataframe")
