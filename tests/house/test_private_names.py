"""Tests use the public face of other modules. What still reaches behind it is counted, and may only get less."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import ROOT

BUDGET = 109
"""Limit of accesses to private names. Lower it when there are fewer."""

NAMES_OF_LIBRARIES = {
    "cloudpickle and pyarrow": {"_arrow_schema_reduce"},
    "confluent-kafka": {"_PARTITION_EOF"},
    "named tuples": {"_replace"},
    "notebooks": {"_repr_html_", "_repr_svg_"},
    "os and sys": {"_current_frames", "_exit"},
    "pyiceberg": {"_do_commit"},
    "pyspark": {"_collect_as_arrow", "_gateway", "_jsc", "_jvm", "_sc"},
    "pytest-xdist": {"_pending_of"},
    "ray": {"_global_node", "_private", "_start_ray_head_node"},
    "typer": {"_get_command"},
}
"""Private names of other libraries: they have no public ones for what these tests need."""


def private_accesses(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the name of each access to a private attribute of another object than `self` and `cls`."""
    libraries = set[str]().union(*NAMES_OF_LIBRARIES.values())
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own and node.attr not in libraries:
                yield node.lineno, node.attr


@pytest.mark.slow
def test_accesses_to_private_names_do_not_grow() -> None:
    """A test that needs more passes a part to a constructor, or uses a seam that has a public name."""
    places: Counter[Path] = Counter()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        places[path.relative_to(ROOT)] += sum(1 for _ in private_accesses(path.read_text(encoding="utf-8")))
    found = sum(places.values())
    assert found <= BUDGET, f"{found} accesses to private names; most of them: {places.most_common(20)}"


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("job._running", ["_running"]),
        ("super()._perform(instruction)", ["_perform"]),
        ("machine._outputs._channels", ["_channels", "_outputs"]),
        ("self._log._store", ["_store"]),
        ("self._log; cls._made; context.__class__; os._exit(0); module.name", []),
    ],
)
def test_private_accesses_are_recognised(line: str, names: list[str]) -> None:
    """Also of a base class: a subclass in a test changes what others rely on."""
    assert sorted(name for _, name in private_accesses(line)) == names
