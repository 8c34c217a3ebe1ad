"""`RestoreThreads`: load a large state on several threads: some copy columns, one fills the key index.

Rules: while they work, no other thread touches the index. Threads copy different columns, whose pages nobody else reads
or writes. So the result does not depend on the order in which they run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa

from tidegate.state.key_index.key_index import KeyIndex

PIECE_BYTES = 1 << 23
"""Keys are indexed in pieces of about so many bytes. To index a piece takes several times its memory."""
_PIECES_AHEAD_MAX = 4
"""How many pieces may wait to be indexed. Then the caller waits for the oldest."""


class RestoreThreads:
    """Up to `threads` threads that copy, and one that fills `index`, which is empty, with up to `keys` keys."""

    def __init__(self, index: KeyIndex, keys: int, threads: int) -> None:
        self._index = index
        self._to_come = keys
        self._threads = threads
        self._copiers = ThreadPoolExecutor(threads, "tidegate-restore")
        self._filler = ThreadPoolExecutor(1, "tidegate-restore-index")
        self._piece: list[pa.RecordBatch] = []
        self._filled: deque[Future[bool]] = deque()
        self._distinct = True

    def side_by_side(self, steps: Sequence[Callable[[], None]]) -> None:
        """Run steps that share no memory, and wait for all. Raises what one of them raises."""
        shares = [steps[first :: self._threads] for first in range(min(self._threads, len(steps)))]
        pending = [self._copiers.submit(_take, share) for share in shares]
        for taken in pending:
            taken.result()

    def index(self, keys: pa.RecordBatch) -> None:
        """Give the next slots to these keys, in the background. No key may come twice."""
        self._piece.append(keys)
        if sum(part.nbytes for part in self._piece) >= PIECE_BYTES:
            self._fill()

    def finish(self) -> bool:
        """Wait until all keys are indexed, and end. False if a key came twice; the index is then useless.

        What Arrow's allocator keeps of the tables that were put together goes back to the system: there will not be so
        many again.
        """
        try:
            if self._piece:
                self._fill()
            while self._filled:
                self._distinct = self._filled.popleft().result() and self._distinct
        finally:
            self.end()
            pa.default_memory_pool().release_unused()
        return self._distinct

    def end(self) -> None:
        """Cancel what has not begun, and wait for what has."""
        self._copiers.shutdown(cancel_futures=True)
        self._filler.shutdown(cancel_futures=True)

    def _fill(self) -> None:
        piece, self._piece = self._piece, []
        self._to_come = max(0, self._to_come - sum(part.num_rows for part in piece))
        self._filled.append(self._filler.submit(self._fill_in, piece, self._to_come))
        if len(self._filled) > _PIECES_AHEAD_MAX:
            self._distinct = self._filled.popleft().result() and self._distinct

    def _fill_in(self, piece: list[pa.RecordBatch], to_come: int) -> bool:
        return self._index.fill(pa.concat_batches(piece), to_come)


def _take(steps: Sequence[Callable[[], None]]) -> None:
    for step in steps:
        step()
