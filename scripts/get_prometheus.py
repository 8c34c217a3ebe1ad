"""Gets Prometheus and promtool from Debian's package, without root: `python scripts/get_prometheus.py [FOLDER]`.

FOLDER is `.tools/prometheus` of this project unless it is named. Whoever has them on the path needs no package. Prints
the folder of the two programs; ends with 1 and the reason where there is neither, nor an apt-get that has the package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAMS = ("prometheus", "promtool")
PACKAGE = "prometheus"
DOWNLOAD_TIMEOUT_S = 300.0
UNPACK_TIMEOUT_S = 60.0


class NotHadError(Exception):
    """There is no Prometheus, and none can be got; the text says why."""


def programs(folder: Path) -> Path:
    """The folder of the programs, which are there afterwards. NotHadError."""
    unpacked = folder / "usr" / "bin"
    if all((unpacked / name).is_file() for name in PROGRAMS):
        return unpacked
    installed = [shutil.which(name) for name in PROGRAMS]
    if installed[0] is not None and all(installed):
        return Path(installed[0]).parent
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise NotHadError(f"prometheus is not installed, and there is no {tool} to get it with")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        _run(["apt-get", "download", "--quiet", PACKAGE], scratch, DOWNLOAD_TIMEOUT_S)
        (package,) = Path(scratch).glob("*.deb")
        _run(["dpkg-deb", "--extract", package.name, "files"], scratch, UNPACK_TIMEOUT_S)
        try:
            os.rename(Path(scratch) / "files", folder)
        except OSError:
            # Another process may have been faster; then its files are there.
            if not (unpacked / PROGRAMS[0]).is_file():
                raise
    return unpacked


def _run(command: list[str], folder: str, timeout_s: float) -> None:
    try:
        done = subprocess.run(command, cwd=folder, timeout=timeout_s, capture_output=True, text=True, check=False)
    except subprocess.TimeoutExpired:
        raise NotHadError(f"{' '.join(command)} was not over within {timeout_s:g} s") from None
    if done.returncode:
        raise NotHadError(
            f"{' '.join(command)} failed, `apt-get update` may help, or prometheus that is installed: "
            f"{done.stderr.strip()[-500:]}"
        )


def main() -> None:
    """Get them, and say where they are."""
    named = sys.argv[1:2]
    folder = Path(named[0]) if named else Path(__file__).resolve().parents[1] / ".tools" / "prometheus"
    try:
        print(programs(folder.absolute()))
    except NotHadError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
