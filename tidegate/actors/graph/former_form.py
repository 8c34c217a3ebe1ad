"""`in_former_form`: steps as an older version made them, for jobs that go on from a checkpoint of that version.

State and rows in flight are found by the uids of operators. Where a method of the public API makes other operators
than it once did, its last node says which nodes it once made (`FormerForm`). They are put in their place, all of them:
one version has made the whole of a checkpoint. A job that has gone on from one in the former form keeps to it.

Whether the checkpoint is of the former form is decided when the job is submitted (`restore_checks.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tidegate.actors.graph.stream_graph import StreamNode


def in_former_form(nodes: Sequence[StreamNode]) -> list[StreamNode] | None:
    """The nodes of a program as older versions made them. None if they made the same."""
    if all(node.former is None for node in nodes):
        return None
    found: list[StreamNode] = []
    now: dict[int, StreamNode] = {}

    def add(node: StreamNode) -> StreamNode:
        made = replace(node, former=None, inputs=tuple((_moved(up, now), how) for up, how in node.inputs))
        found.append(made)
        now[id(node)] = made
        return made

    for node in nodes:
        if node.former is None:
            add(node)
            continue
        del found[len(found) - (node.former.instead_of - 1) :]
        for former in node.former.nodes:
            now[id(node)] = add(former)
    return found


def _moved(node: StreamNode, now: dict[int, StreamNode]) -> StreamNode:
    if node.taps is None:
        return now[id(node)]
    maker, tag = node.taps
    return replace(node, taps=(now[id(maker)], tag))
