"""The operators of one task, in a row: each one's output is the next one's input, by plain calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import pyarrow as pa

from tidegate.actors.graph.job_graph import OperatorSpec
from tidegate.actors.operators.base import Emit, Operator, OperatorContext
from tidegate.actors.operators.table_sink import TableSink
from tidegate.storage.ids import OperatorUid, SubtaskIndex
from tidegate.storage.state import OperatorSnapshot, StateTable


@dataclass(frozen=True, slots=True)
class _Link:
    """An operator and the function that takes its output."""

    operator: Operator
    emit: Emit


class OperatorChain:
    """Opened operators; `output` takes what the last one emits."""

    def __init__(
        self,
        specs: Sequence[OperatorSpec],
        subtask: SubtaskIndex,
        parallelism: int,
        max_parallelism: int,
        output: Emit,
    ) -> None:
        self._specs = tuple(specs)
        self._contexts = [OperatorContext(spec.uid, spec.name, subtask, parallelism, max_parallelism) for spec in specs]
        links: list[_Link] = []
        emit = output
        for spec in reversed(specs):
            link = _Link(spec.factory(), emit)
            links.append(link)
            emit = _entry(link)
        self._links = links[::-1]
        self._closing = ExitStack()
        self.process = emit
        """Process one batch through the whole chain."""
        self._sinks = {
            spec.uid: link.operator
            for spec, link in zip(self._specs, self._links, strict=True)
            if isinstance(link.operator, TableSink)
        }

    def open(self, tables: Mapping[OperatorUid, Sequence[StateTable]]) -> None:
        """Open every operator with its restored state, last one first, so that each may emit at once."""
        for link, context in zip(reversed(self._links), reversed(self._contexts), strict=True):
            self._closing.callback(link.operator.close)
            link.operator.open(context, tuple(tables.get(context.uid, ())))

    def prepare_snapshot(self) -> None:
        """Let every operator emit what belongs before the barrier, first one first."""
        for link in self._links:
            link.operator.prepare_snapshot(link.emit)

    def snapshot(self) -> list[OperatorSnapshot]:
        """Freeze every stateful operator."""
        snapshots = (link.operator.snapshot() for link in self._links)
        return [snapshot for snapshot in snapshots if snapshot is not None]

    def take_pending(self, force: bool) -> list[tuple[OperatorUid, tuple[pa.RecordBatch, ...]]]:
        """What the sinks of the chain want to be staged as files now, one entry a file."""
        staged = []
        for uid, sink in self._sinks.items():
            pending = sink.take_pending(force)
            if pending:
                staged.append((uid, tuple(pending)))
        return staged

    def finish(self) -> Iterator[None]:
        """End of input: every operator emits what it has left, first one first; in steps, one a batch."""
        for link in self._links:
            yield from link.operator.finish(link.emit)

    def close(self) -> None:
        """Close every operator that was to be opened, once, first one first; all of them, also when one raises."""
        self._closing.close()


def _entry(link: _Link) -> Emit:
    def process(batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            link.operator.process(batch, link.emit)

    return process
