"""Refuses a job in which changes may come twice to a step that calculates with them.

`StreamEnvironment` calls it. At least once, what is behind a barrier may be in the state of a checkpoint, and comes
again after a restore:

- An aggregate or a join takes a row back that it has taken back already. That fails the job, and every restart of it.
- A table of calculated changes may show a row for ever. After a restore rows come in other batches, so not every
  version of a key is told again: one that the table has, and that a filter had let pass, is not taken back.
- Changes that were recorded are the same ones in the same order. The last one of each key decides what a table shows,
  so they may come again.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.api.config.sections.checkpoint_config import CheckpointConfig
from tidegate.api.config.sections.setting_names import titled
from tidegate.storage.errors import ConfigurationError


def check_changes_come_once(nodes: Iterable[StreamNode], config: CheckpointConfig) -> None:
    """Raise ConfigurationError if a step needs each change once, and the checkpoints are at least once."""
    if config.mode == "exactly_once":
        return
    for node in nodes:
        if node.takes_back is not None:
            raise ConfigurationError(
                f"{node.name!r} (uid {node.uid!r}) takes rows back that {node.takes_back} emits as changes, but "
                f"{titled('mode')} is {config.mode!r}: after a failure a row could be taken back twice, or never. Use "
                'CheckpointConfig(mode="exactly_once"), the default, or no changes: emit="update" or "final"'
            )
