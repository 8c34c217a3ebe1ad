"""Run the quick tests with the newest versions of what tidegate needs that are known, PySpark 4 among them.

    python scripts/test_newest.py [--install-only] [ARGUMENTS OF PYTEST]

Makes `.venv-newest` with the versions of `constraints-newest.txt`, again only if these or pyproject.toml have changed
since, and runs in it what `make test-fast` runs, but for the tests of the repository itself. `--python PATH` says which
Python to use instead of python3.13, `--venv PATH` where to make it.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints-newest.txt"
EXTRAS = "delta,examples,kafka,ray,rocksdb,s3,spark,test,web"
"""All but RayDP, which takes no PySpark 4."""
QUICK = ("--kinds", "unit, contract, docs, local jobs", "-m", "not slow")


def python_of(name: str) -> str:
    """A Python of this name that starts and makes environments. SystemExit if there is none."""
    found = shutil.which(name)
    if found is not None and not subprocess.run([found, "-c", "import venv"], capture_output=True).returncode:
        return found
    raise SystemExit(f"{name} is not on the PATH, or cannot make an environment: install it, or name one by --python")


def environment(folder: Path, python: str) -> Path:
    """The Python of an environment with these versions; made anew if anything that it depends on has changed."""
    content = (ROOT / "pyproject.toml").read_bytes() + CONSTRAINTS.read_bytes()
    state = hashlib.sha256(content + python.encode()).hexdigest()
    stamp, made = folder / ".tidegate-setup", folder / "bin" / "python"
    if not (stamp.is_file() and stamp.read_text() == state):
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(made), "-u", "-m", "pip", "install", "--progress-bar", "off", "--constraint", str(CONSTRAINTS)]
        show = [sys.executable, str(ROOT / "scripts" / "show_install.py"), str(CONSTRAINTS)]
        subprocess.run([*show, *install, "--editable", f"{ROOT}[{EXTRAS}]"], check=True)
        stamp.write_text(state)
    return made


def main() -> int:
    """Make the environment, run the tests. Exit code: that of pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install-only", action="store_true", help="run no tests")
    parser.add_argument("--python", default="python3.13", help="the Python to use (default python3.13)")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-newest", help="where the environment is made")
    arguments, others = parser.parse_known_args()
    python = environment(arguments.venv, python_of(arguments.python))
    if arguments.install_only:
        return 0
    return subprocess.run([str(python), "-m", "pytest", *(others or QUICK)], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
