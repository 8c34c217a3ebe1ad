"""What the house tests know about the repository: its root, its package, its files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tidegate"

ROOMS = ("actors", "recovery", "spark_bridge", "storage")
"""Folders of the package that the root shows as well, by links."""

FOLDERS = (".ci", ".github", "scripts", "configs", "docs", "tests", "examples", "benchmarks", "tidegate")
"""Folders that hold committed files; everything else at the root is a link to a room, or generated."""

_NOT_OURS = (".git", ".coverage", "derby.log")
"""Files at the root that git, `make cov` and Spark write."""


def package_files() -> list[Path]:
    """Every Python file that is installed."""
    return sorted(PACKAGE.rglob("*.py"))


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements of a tree, at any depth, without the expressions in them: those are nine nodes of ten."""
    waiting = list(ast.iter_child_nodes(tree))
    while waiting:
        node = waiting.pop()
        if not isinstance(node, ast.expr):
            yield node
            waiting += ast.iter_child_nodes(node)


def files() -> Iterator[Path]:
    """Every file of the repository that is not generated."""
    at_the_root = (path for path in ROOT.iterdir() if not path.name.startswith(_NOT_OURS))
    yield from sorted(path for path in at_the_root if path.is_file())
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path
