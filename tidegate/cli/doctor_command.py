"""The commands `doctor` and `--version`: which parts of tidegate work on this machine, and how to install the rest.

`doctor` changes nothing and does not connect to a cluster. It checks installed packages, the Java that Spark would use,
and the disk, the memory and the ports of this machine.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import typer

from tidegate.cli.terminal import JsonOption, print_json
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.extras import EXTRAS, need

State = Literal["ok", "optional", "wrong"]
_DISK_BYTES_MIN = 1 << 30
_FILES_MIN = 1_024
_PORTS = {8081: "the page of the jobs takes the next free one", 8265: "the dashboard of Ray"}


@dataclass(frozen=True)
class Finding:
    """The result of one check: the situation and, if something does not work, advice."""

    what: str
    state: State
    found: str
    advice: str = ""


def show_version(wanted: bool) -> None:
    """Prints the version and ends the program, if `--version` is given."""
    if wanted:
        print(f"tidegate {metadata.version('tidegate')}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
]


def main_options(version: VersionOption = False) -> None:
    """Look at tidegate's jobs, checkpoints and event logs, and run programs."""


def doctor_command(as_json: JsonOption = False) -> None:
    """Report what works on this machine, what is missing, and how to get it. Ends with 1 if something is wrong."""
    findings = list(examine())
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        width = max(len(finding.what) for finding in findings)
        marks = {"ok": "ok", "optional": "--", "wrong": "!!"}
        for finding in findings:
            print(f"{marks[finding.state]}  {finding.what:<{width}}  {finding.found}")
            if finding.advice:
                print(f"    {'':<{width}}  {finding.advice}")
    if any(finding.state == "wrong" for finding in findings):
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """Yields the results of all checks: first for every program, then for programs that need an extra, Spark or Ray."""
    yield Finding("tidegate", "ok", f"{metadata.version('tidegate')}, Python {sys.version.split()[0]} in {sys.prefix}")
    yield from _libraries()
    yield from _extras()
    yield from _java()
    yield from _machine()


def _libraries() -> Iterator[Finding]:
    for requirement in metadata.requires("tidegate") or ():
        name = re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0]
        if "extra ==" in requirement:
            continue
        try:
            yield Finding(name, "ok", metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(name, "wrong", "not installed", f"pip install '{requirement.partition(';')[0].strip()}'")


def _extras() -> Iterator[Finding]:
    packages = metadata.packages_distributions()
    for extra, modules in EXTRAS.items():
        try:
            need(f"tidegate[{extra}]", extra)
        except ConfigurationError:
            yield Finding(f"[{extra}]", "optional", "not installed", f"pip install 'tidegate[{extra}]'")
            continue
        versions = []
        for module in modules:
            distribution = packages.get(module, [module])[0]
            versions.append(f"{distribution} {metadata.version(distribution)}")
        yield Finding(f"[{extra}]", "ok", ", ".join(versions))


def _java() -> Iterator[Finding]:
    try:
        need("Spark", "spark")
        from tidegate.spark_bridge.java import ensure_java, java_major_of
    except (ConfigurationError, ImportError):
        yield Finding("Java", "optional", "not looked at: Spark is not installed", "pip install 'tidegate[spark]'")
        return
    try:
        home = ensure_java(dict(os.environ))
    except ConfigurationError as error:
        yield Finding("Java", "wrong", "none that runs the installed Spark", str(error))
        return
    yield Finding("Java", "ok", f"Java {java_major_of(home)} at {home}, for PySpark {metadata.version('pyspark')}")


def _machine() -> Iterator[Finding]:
    yield Finding(
        "processors", "ok", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    )
    folders = {"temporary files": tempfile.gettempdir()}
    if Path("/dev/shm").is_dir():
        folders["shared memory"] = "/dev/shm"
    for what, folder in folders.items():
        free = shutil.disk_usage(folder).free
        little = free < _DISK_BYTES_MIN
        advice = "less than 1 GiB: Ray and local checkpoints need more" if little else ""
        yield Finding(what, "wrong" if little else "ok", f"{free / 2**30:.1f} GiB free in {folder}", advice)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files != resource.RLIM_INFINITY and files < _FILES_MIN
    yield Finding("open files", "wrong" if few else "ok", str(files), f"ulimit -n {_FILES_MIN}" if few else "")
    for port, used_by in _PORTS.items():
        with socket.socket() as probe:
            taken = probe.connect_ex(("127.0.0.1", port)) == 0
        yield Finding(f"port {port}", "optional" if taken else "ok", f"{'taken' if taken else 'free'} ({used_by})")
