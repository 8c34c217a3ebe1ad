"""Predicates of `actors/coordinator/invariants.py`, broken: what they forbid is done, and the oracle has to see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from tidegate.actors.coordinator import invariants

Patch = Callable[[], AbstractContextManager[Any]]


def _says(predicate: str, answer: object) -> Patch:
    """A predicate that always gives the same answer."""
    assert hasattr(invariants, predicate)
    return lambda: patch.object(invariants, predicate, lambda *args: answer)


INVARIANT_PATCHES: dict[str, tuple[int, Patch]] = {
    "invariants: an attempt does not wait for fates": (7, _says("is_fate_known", True)),
    "invariants: what is built on may go": (5, _says("is_built_on", False)),
}
"""Every such break: its invariant, and the patch."""

INVARIANT_FIXED: Mapping[str, Mapping[str, str | int]] = {
    "invariants: an attempt does not wait for fates": {"faults": "all"},
}
"""What is not drawn for them: a fate is unknown only after faults."""
