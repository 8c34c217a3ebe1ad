"""What the house tests know about the repository: its root, its map of packages, its files."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Folders that hold committed files; everything else at the root is generated.
FOLDERS = (
    *(".ci", "scripts", "configs", "docs", "tests", "examples", "benchmarks"),
    *("api", "actors", "recovery", "spark_bridge", "storage"),
)


def setuptools_table(root: Path = ROOT) -> dict[str, object]:
    """The table `tool.setuptools` of pyproject.toml."""
    with (root / "pyproject.toml").open("rb") as file:
        table: dict[str, object] = tomllib.load(file)["tool"]["setuptools"]
    return table


def package_dir(root: Path = ROOT) -> dict[str, str]:
    """Package name to folder, for the rooms."""
    table = setuptools_table(root)["package-dir"]
    assert isinstance(table, dict)
    return table


def room_files() -> list[Path]:
    """Every Python file of the rooms that are installed."""
    return sorted(path for folder in package_dir().values() for path in (ROOT / folder).rglob("*.py"))


def files() -> Iterator[Path]:
    """Every file of the repository that is not generated."""
    yield from sorted(path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".git"))
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path
