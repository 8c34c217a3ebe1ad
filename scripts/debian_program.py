"""Get a program out of Debian's packages, with the libraries that this machine lacks, without root.

    python scripts/debian_program.py chromium-headless-shell [--into .debian]

Downloads the package and what it needs with `apt-get download`, and unpacks all of it into a folder of its own: nothing
of the system changes. Prints that folder; a second call finds it there. `library_path` says where its libraries are.
Where apt is missing, or knows no such package, the exit code is 1 and one line says why.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / ".debian"
INST = re.compile(r"^Inst (?P<name>\S+) (?:\[\S+\] )?\((?P<version>\S+) ", re.MULTILINE)
PACKAGES_MAX = 100
SECONDS_MAX = 300
"""For each command."""


class NotHadError(Exception):
    """Why a program is not to be had here, in one line."""


def missing_packages(simulated: str) -> list[str]:
    """What `apt-get --simulate install` would install, as `name=version`."""
    return [f"{found['name']}={found['version']}" for found in INST.finditer(simulated)]


def get(package: str, into: Path = FOLDER) -> Path:
    """The folder with the program and its libraries, laid out as in Debian (`usr/bin`, `usr/lib`).

    Raises NotHadError.
    """
    folder = into / package
    if folder.is_dir():
        return folder
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise NotHadError(f"{package}: this machine has no apt-get, or no dpkg-deb")
    simulated = _run(["apt-get", "--simulate", "--no-install-recommends", "install", package])
    wanted = missing_packages(simulated)
    if not wanted:
        raise NotHadError(f"{package} is installed already")
    if len(wanted) > PACKAGES_MAX:
        raise NotHadError(f"{package} needs {len(wanted)} packages, more than {PACKAGES_MAX}")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as temporary:
        work = Path(temporary)
        _run(["apt-get", "download", *wanted], cwd=work)
        for archive in sorted(work.glob("*.deb")):
            _run(["dpkg-deb", "--extract", str(archive), str(work / "unpacked")])
        try:
            (work / "unpacked").rename(folder)
        except OSError:
            if not folder.is_dir():  # somebody else was faster
                raise
    return folder


def library_path(folder: Path) -> str:
    """LD_LIBRARY_PATH for programs in such a folder: Debian's folders of libraries, those of single packages too."""
    roots = [path for part in ("usr/lib", "lib") for path in sorted((folder / part).glob("*-linux-gnu*"))]
    found = [path for root in roots for path in (root, *sorted(root.rglob("*"))) if any(path.glob("*.so*"))]
    return os.pathsep.join(map(str, found))


def _run(command: list[str], cwd: Path | None = None) -> str:
    # In another language apt would say the same otherwise.
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        run = subprocess.run(
            command, cwd=cwd, env=environment, check=True, capture_output=True, text=True, timeout=SECONDS_MAX
        )
    except subprocess.TimeoutExpired:
        raise NotHadError(f"`{' '.join(command[:4])}` did not end within {SECONDS_MAX} s") from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("E:")] or error.stderr.splitlines()[-1:]
        raise NotHadError(f"`{' '.join(command[:4])}` failed: {' '.join(lines)}") from None
    return run.stdout


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("package")
    parser.add_argument("--into", type=Path, default=FOLDER)
    given = parser.parse_args()
    try:
        print(get(given.package, given.into))
    except NotHadError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
