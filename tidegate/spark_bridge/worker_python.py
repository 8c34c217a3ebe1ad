"""Refuses environments in which Spark cannot run tidegate's code: Spark Connect, and workers with another Python.

Spark Connect is found when a DataFrame or a session is passed to tidegate, another Python before workers are needed.
Spark's own errors would come later, after pages of stack traces, and name neither the setting nor a solution.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from shutil import which

from pyspark.sql import SparkSession

from tidegate.storage.errors import ConfigurationError

_PROBE_TIMEOUT_S = 20.0
_PROBE = (
    "import sys, importlib.metadata as m\n"
    "try: has = m.version('tidegate')\n"
    "except m.PackageNotFoundError: has = 'none'\n"
    "print('%d.%d' % sys.version_info[:2], has)"
)


def refuse_connect(given: object, what: str) -> None:
    """Raises ConfigurationError for a DataFrame or SparkSession of Spark Connect.

    `what` names the call in the error text.
    """
    kind = f"{type(given).__module__}.{type(given).__name__}"
    if kind.startswith("pyspark.sql.connect"):
        raise ConfigurationError(
            f"{what}: {kind} is of Spark Connect, and tidegate needs a SparkSession with its driver in this "
            "process: make it with SparkSession.builder.master(...), or give Parquet files to from_files"
        )


def refuse_unfit_workers(spark: SparkSession, what: str) -> None:
    """Raises ConfigurationError if Spark's workers run on this machine and cannot run tidegate's code.

    `what` names the call, such as "from_dataframe". Workers on other machines are not checked.
    """
    context = spark.sparkContext
    if str(context.master).startswith("local"):
        refuse_other_python(str(context.pythonExec), what)


def refuse_other_python(executable: str, what: str) -> None:
    """Raises ConfigurationError if the Python of Spark's workers on this machine cannot run tidegate's code."""
    found = _surroundings(executable, os.environ.get("PATH", ""))
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if found is None:
        lacks = "which does not start"
    elif found[0] != here:
        lacks = f"which is Python {found[0]}, and this program runs on {here}"
    elif found[1] != version("tidegate"):
        lacks = f"which has {'no tidegate' if found[1] == 'none' else f'tidegate {found[1]}'}"
    else:
        return
    raise ConfigurationError(f"{what}: Spark's workers run {executable!r}, {lacks}. {other_python_advice()}")


def other_python_advice() -> str:
    """Returns the advice for error texts about workers with another Python."""
    return (
        f"Set PYSPARK_PYTHON={sys.executable} (or spark.pyspark.python) before the SparkSession is made: workers need "
        "the Python environment of the driver"
    )


@lru_cache(maxsize=16)
def _surroundings(executable: str, path: str) -> tuple[str, str] | None:
    """Returns the version of a Python and of its tidegate ("none" if not installed), or None if it does not start."""
    found = which(executable, path=path)
    if found is not None and Path(found).absolute() == Path(sys.executable).absolute():
        return f"{sys.version_info[0]}.{sys.version_info[1]}", version("tidegate")
    try:
        done = subprocess.run(
            [executable, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = done.stdout.split()
    return (words[0], words[1]) if done.returncode == 0 and len(words) == 2 else None
