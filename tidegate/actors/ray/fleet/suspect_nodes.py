"""`SuspectNodes`: nodes from which nobody answers any more, and for how long they are left alone. Pure.

A node whose link is cut closes no connection, and Ray takes a minute to give it up. What is started there meanwhile
waits for the link, and fails with the node: a second restart for one cut. Rules:

- A node is suspect when a process there counts as hung, and all others that are known there have been silent for half
  of that time at least. A process that hangs alone, among others that answer, says nothing of its node.
- The node of the coordinator is never suspect: it would not hear the others either.
- A suspicion ends when Ray's head has reached the node, or says that it is dead, or after `limit_ms`: then processes
  are started there again.
"""

from __future__ import annotations

from collections.abc import Collection

SUSPECT_MS_MAX = 120_000
"""Ray gives up a node that is cut off in about half of that."""
SHARE = 2
"""Others must have been silent for this part of the time after which one counts as hung."""


class SuspectNodes:
    """Those of one job. Times in ms, by a clock that nobody sets."""

    def __init__(self, own: str, timeout_ms: int, limit_ms: int = SUSPECT_MS_MAX) -> None:
        self._own = own
        self._timeout_ms = timeout_ms
        self._limit_ms = limit_ms
        self._since_ms: dict[str, int] = {}

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes that are suspect now. From any thread."""
        return frozenset(list(self._since_ms))

    def is_silent(self, node: str, others_ms: Collection[int], now_ms: int) -> bool:
        """A process of a node does not answer. `others_ms`: for how long the others there have not. Whether that makes
        the node suspect, which it was not before.
        """
        if node == self._own or node in self._since_ms or any(ms * SHARE < self._timeout_ms for ms in others_ms):
            return False
        self._since_ms[node] = now_ms
        return True

    def is_known(self, node: str) -> bool:
        """The node answers, or is known to be dead. Whether it was suspect."""
        return self._since_ms.pop(node, None) is not None

    def pass_time(self, now_ms: int) -> list[str]:
        """Nodes that were suspect for so long that they are no more."""
        over = [node for node, since_ms in self._since_ms.items() if now_ms - since_ms >= self._limit_ms]
        for node in over:
            del self._since_ms[node]
        return over
