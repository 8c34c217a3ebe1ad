"""What the house tests know about the repository: its root, its package, its files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tidegate"

ROOMS = ("actors", "recovery", "spark_bridge", "storage")
"""Folders of the package that the root shows as well, by links."""

FOLDERS = (".ci", "scripts", "configs", "docs", "tests", "examples", "benchmarks", "tidegate")
"""Folders that hold committed files; everything else at the root is a link to a room, or generated."""


def package_files() -> list[Path]:
    """Every Python file that is installed."""
    return sorted(PACKAGE.rglob("*.py"))


def files() -> Iterator[Path]:
    """Every file of the repository that is not generated."""
    yield from sorted(path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".git"))
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path
