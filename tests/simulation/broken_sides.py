"""Rules of side outputs, broken on purpose. Each is a patch that holds while a seed runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from tidegate.actors.graph.job_graph import JobEdge, JobGraph
from tidegate.operators.functions.process_functions import SideRows

Patch = Callable[[], AbstractContextManager[Any]]

_flush, _edge_name = SideRows.flush, JobGraph.edge_name


def _every_other_call(self: SideRows) -> None:
    """Breaks: rows leave when the call ends. Here some wait for the next call, and for the one that ends the input."""
    own = vars(self)
    own["waits"] = not own.get("waits", False)
    if not own["waits"]:
        _flush(self)


def _without_the_tag(self: JobGraph, edge: JobEdge) -> str:
    """Breaks: edges between the same operators have different names. Here a side output has the name of the main
    output.
    """
    return f"{self.emitter(edge)}->{edge.downstream}#0"


SIDE_PATCHES: dict[str, tuple[int, Patch]] = {
    "side outputs: rows are held back over a barrier": (6, lambda: patch.object(SideRows, "flush", _every_other_call)),
    "side outputs: an edge has the name of another": (3, lambda: patch.object(JobGraph, "edge_name", _without_the_tag)),
}
"""Every such break: its invariant, and the patch."""

_ASIDE: Mapping[str, Hashable] = {"topology": "aside"}
SIDE_FIXED: Mapping[str, Mapping[str, Hashable]] = {
    "side outputs: rows are held back over a barrier": _ASIDE | {"turn_rows": 1, "rows": 60},
    "side outputs: an edge has the name of another": _ASIDE
    | {"mode": "exactly-once", "alignment": "unaligned", "max_concurrent": 1, "buffers": "tiny", "rows": 60},
}
"""Fixed values of the scenarios for these breaks."""
