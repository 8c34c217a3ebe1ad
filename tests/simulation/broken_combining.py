"""Rules of rows that are combined before they are sent, broken on purpose: patches that hold while a seed runs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from unittest.mock import patch

import pyarrow as pa
from broken_rules import Patch
from random_jobs.window_topologies import PROGRAMS

from tidegate.operators import combiner
from tidegate.operators.combiner import Combiner

_combine = Combiner.combine


def _once_too_much(self: Combiner, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Breaks: a combined row stands for its rows. Here the first row of a batch is in it, and sent as well."""
    combined = _combine(self, batch)
    if combined is batch:
        return batch
    return _combine(self, pa.Table.from_batches([batch.slice(0, 1), batch]).combine_chunks().to_batches()[0])


COMBINING_PATCHES: dict[str, tuple[int, Patch]] = {
    "combining: a row counts once too much": (6, lambda: patch.object(Combiner, "combine", _once_too_much)),
    "combining: rows of several slices become one": (6, lambda: patch.object(combiner, "slices_of", lambda spec: None)),
}
"""Every such break: its invariant, and the patch."""

_COMBINED: Mapping[str, Hashable] = {
    "mode": "exactly-once",
    "faults": "tasks",
    "ending": "finish",
    "combined": "always",
}
COMBINING_FIXED: Mapping[str, Mapping[str, Hashable]] = {
    "combining: a row counts once too much": _COMBINED,
    "combining: rows of several slices become one": {**_COMBINED, "topology": "windows", "rows": 3 * len(PROGRAMS) + 1},
}
"""Fixed values of the scenarios for these breaks. With a late side output nothing is combined, so this many rows are
all in time.
"""
