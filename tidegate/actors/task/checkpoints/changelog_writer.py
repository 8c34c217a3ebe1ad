"""`ChangelogWriter`: freezes segments and bases of a task's changelog, and gives snapshots their layers.

`SubtaskCheckpoints` calls it; `ChangeLog` decides what is written when.
"""

from __future__ import annotations

from collections.abc import Callable

from tidegate.actors.task.incremental.changelog import Chain, ChangeLog, ChangelogLimits
from tidegate.actors.task.messages import events as ev
from tidegate.actors.task.messages import instructions as do
from tidegate.actors.task.pipeline.operator_chain import OperatorChain
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.checkpoints.metadata import StateHandle
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot


class ChangelogWriter:
    """The changelog of one task. `changes` freezes the keyed state of its operators, and no more."""

    def __init__(
        self,
        changes: Callable[[Cut], tuple[OperatorSnapshot, ...]],
        changed_bytes: Callable[[], int],
        instruct: Callable[[do.TaskInstruction], None],
        limits: ChangelogLimits,
    ) -> None:
        self._changes = changes
        self._changed_bytes = changed_bytes
        self._instruct = instruct
        self._limits = limits
        self._log = ChangeLog((), self._limits)
        self._last_snapshot = 0

    @staticmethod
    def of(
        options: StateBackendOptions, chain: OperatorChain, instruct: Callable[[do.TaskInstruction], None]
    ) -> ChangelogWriter | None:
        """The changelog of a task with these operators; None if the options ask for none."""
        if not options.changelog:
            return None
        limits = ChangelogLimits.of(options.segment_bytes)
        return ChangelogWriter(chain.changes, lambda: chain.changed_bytes, instruct, limits)

    def restored(self, layers: tuple[StateHandle, ...]) -> None:
        """The task goes on from these layers."""
        self._log = ChangeLog(layers, self._limits)

    def for_snapshot(self, cut: Cut) -> tuple[Cut, Chain | None, int]:
        """Write what has changed, for a snapshot that is taken now.

        Returns what is left for the snapshot itself to hold, the layers that complete it, and the number of the newest
        layer of the snapshot before.

        A canonical savepoint holds everything itself, and the log begins anew: if the savepoint is the only checkpoint
        that is retained, the log's files go, because only older checkpoints refer to them.
        """
        if cut.canonical:
            self._log.start_anew()
            return cut, None, self._last_snapshot
        self._write(self._log.seal())
        chain, since = self._log.take(), self._last_snapshot
        self._last_snapshot = chain.layers[-1].number
        return Cut(cut.checkpoint_id, keyed=False), chain, since

    def go_on(self) -> None:
        """Between two turns: write a base, or changes, if it is time."""
        if self._log.wants_base():
            for cut in self._log.seal_with_base():
                self._write(cut)
        elif self._log.wants_segment(self._changed_bytes()):
            self._write(self._log.seal())

    def answered(self, event: ev.SegmentPersisted | ev.SegmentFailed) -> None:
        """A segment or a base is durable, or will never be."""
        if isinstance(event, ev.SegmentPersisted):
            discarded = self._log.written(event.number, event.whole, event.handle)
        else:
            discarded = self._log.failed(event.number, event.whole)
        paths = tuple(handle.path for handle in discarded if handle.path is not None)
        if paths:
            self._instruct(do.DiscardState(paths))

    def _write(self, cut: Cut) -> None:
        self._instruct(do.PersistSegment(int(cut.checkpoint_id), cut.base is None, self._changes(cut)))
