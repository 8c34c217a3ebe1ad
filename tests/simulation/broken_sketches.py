"""Rules of sketches, broken on purpose. Each is a patch that holds while a seed runs, over a pipeline of its own."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
from broken_rules import Patch
from numpy.typing import NDArray
from sketch_topology import NAME, known

from tidegate.actors.task.operator_chain import OperatorChain
from tidegate.operators.aggregates import sketches
from tidegate.operators.aggregates.aggregate_function import Groups
from tidegate.operators.aggregates.sketches import ApproxQuantile

_open, _hash_forms, _added = OperatorChain.open, sketches.hash_forms, ApproxQuantile.added


@contextmanager
def _with_other_hashes() -> Iterator[None]:
    """Breaks: a value has the same hash in every process. Here each attempt of a task has its own."""
    attempts = 0

    def opened(self: OperatorChain, *arguments: Any) -> None:
        nonlocal attempts
        attempts += 1
        _open(self, *arguments)

    def hashes(*arguments: Any) -> NDArray[np.uint64]:
        return _hash_forms(*arguments) ^ np.uint64(attempts)

    with patch.object(OperatorChain, "open", opened), patch.object(sketches, "hash_forms", hashes):
        yield


def _in_its_place(
    self: ApproxQuantile, state: pa.RecordBatch, groups: Groups, numbers: NDArray[np.float64]
) -> Iterator[tuple[int, bytes]]:
    """Breaks: what a batch brings is added to the digest that is there. Here it takes its place."""
    yield from _added(self, pa.record_batch({"sketch": pa.nulls(state.num_rows, pa.large_binary())}), groups, numbers)


def _over_sketches(broken: Patch) -> Patch:
    @contextmanager
    def patched() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(known())
            stack.enter_context(broken())
            yield

    return patched


SKETCH_PATCHES: dict[str, tuple[int, Patch]] = {
    "sketches: a value has another hash after a restore": (6, _over_sketches(_with_other_hashes)),
    "sketches: a batch takes the place of what is there": (
        6,
        _over_sketches(lambda: patch.object(ApproxQuantile, "added", _in_its_place)),
    ),
}
"""Every such break: its invariant, and the patch."""

_SKETCHES: Mapping[str, Hashable] = {
    "topology": NAME,
    "mode": "exactly-once",
    "sources": "at once",
    "ending": "finish",
    "rows": 60,
}
SKETCH_FIXED: Mapping[str, Mapping[str, Hashable]] = {
    "sketches: a value has another hash after a restore": {**_SKETCHES, "faults": "tasks", "interval_ms": 60},
    "sketches: a batch takes the place of what is there": _SKETCHES,
}
"""Fixed values of the scenarios for these breaks."""
