"""Run the quick tests with other versions of what tidegate needs: the newest that are known, or the lowest.

    python scripts/test_versions.py newest|lowest [--install-only] [ARGUMENTS OF PYTEST]

Makes `.venv-newest` with the versions of `constraints-newest.txt`, PySpark 4 among them, or `.venv-lowest` with those
of `constraints-lowest.txt`, the lower ends of the ranges in pyproject.toml. An environment is made again only if these
or pyproject.toml have changed since. What `make test-fast` runs is run in it, but for the tests of the repository
itself. `--python PATH` says which Python to use instead of python3.13 or python3.11, `--venv PATH` where to make it.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = "delta,examples,kafka,ray,rocksdb,s3,sketches,spark,test,web"


@dataclass(frozen=True, slots=True)
class Versions:
    """Which Python and which extras a set of versions is for."""

    python: str
    extras: str


SETS = {
    # RayDP takes no PySpark 4.
    "newest": Versions("python3.13", EXTRAS),
    "lowest": Versions("python3.11", f"{EXTRAS},raydp"),
}
QUICK = ("--kinds", "unit, contract, docs, local jobs", "-m", "not slow")


def python_of(name: str) -> str:
    """A Python of this name that starts and makes environments. SystemExit if there is none."""
    found = shutil.which(name)
    if found is not None and not subprocess.run([found, "-c", "import venv"], capture_output=True).returncode:
        return found
    raise SystemExit(f"{name} is not on the PATH, or cannot make an environment: install it, or name one by --python")


def environment(folder: Path, python: str, constraints: Path, extras: str) -> Path:
    """The Python of an environment with these versions; made anew if anything that it depends on has changed."""
    content = (ROOT / "pyproject.toml").read_bytes() + constraints.read_bytes()
    state = hashlib.sha256(content + python.encode()).hexdigest()
    stamp, made = folder / ".tidegate-setup", folder / "bin" / "python"
    if not (stamp.is_file() and stamp.read_text() == state):
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(made), "-u", "-m", "pip", "install", "--progress-bar", "off", "--constraint", str(constraints)]
        show = [sys.executable, str(ROOT / "scripts" / "show_install.py"), str(constraints)]
        subprocess.run([*show, *install, "--editable", f"{ROOT}[{extras}]"], check=True)
        stamp.write_text(state)
    return made


def main() -> int:
    """Make the environment, run the tests. Exit code: that of pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", choices=SETS, help="which versions")
    parser.add_argument("--install-only", action="store_true", help="run no tests")
    parser.add_argument("--python", help="the Python to use (default python3.13 or python3.11)")
    parser.add_argument("--venv", type=Path, help="where the environment is made")
    arguments, others = parser.parse_known_args()
    versions, name = SETS[arguments.versions], arguments.versions
    folder = arguments.venv or ROOT / f".venv-{name}"
    base = python_of(arguments.python or versions.python)
    python = environment(folder, base, ROOT / f"constraints-{name}.txt", versions.extras)
    if arguments.install_only:
        return 0
    return subprocess.run([str(python), "-m", "pytest", *(others or QUICK)], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
