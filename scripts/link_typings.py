"""Make `.typings/tidegate`, a folder of links in the shape that tidegate has once it is installed.

setuptools' package-dir maps the rooms at the root of the repository to `tidegate.*`. Tools that read source
files (mypy, import-linter) do not know that map. It is read from pyproject.toml, so that there is one of it.
Links that are right already are left alone: another run beside this one may be reading them.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

_IGNORED = {"__pycache__"}


def link_typings(root: Path, target: Path) -> list[Path]:
    """Link the rooms of the repository `root` into the folder `target`; returns all links, sorted.

    Raises KeyError if pyproject.toml has no package-dir map, OSError if a link cannot be made.
    """
    wanted = _wanted_links(root, target)
    for folder in sorted({link.parent for link in wanted}):
        folder.mkdir(parents=True, exist_ok=True)
        for entry in folder.iterdir():
            if entry.is_symlink() and entry not in wanted:
                entry.unlink(missing_ok=True)
    for link, source in wanted.items():
        if link.is_symlink() and link.readlink() == source:
            continue
        link.unlink(missing_ok=True)
        link.symlink_to(source)
    return sorted(wanted)


def _wanted_links(root: Path, target: Path) -> dict[Path, Path]:
    with (root / "pyproject.toml").open("rb") as file:
        package_dir: dict[str, str] = tomllib.load(file)["tool"]["setuptools"]["package-dir"]
    wanted: dict[Path, Path] = {}
    for package, folder in package_dir.items():
        source = (root / folder).resolve()
        place = target.joinpath(*package.split("."))
        if any(other.startswith(f"{package}.") for other in package_dir):
            # Other rooms hang below this package, so it must be a folder of its own, with links inside.
            for entry in source.iterdir():
                if entry.name not in _IGNORED:
                    wanted[place / entry.name] = entry
        else:
            wanted[place] = source
    return wanted


def main() -> int:
    """Link the repository that this script lies in."""
    root = Path(__file__).resolve().parent.parent
    links = link_typings(root, root / ".typings")
    print(f"{len(links)} links in .typings")
    return 0


if __name__ == "__main__":
    sys.exit(main())
