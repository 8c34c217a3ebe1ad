"""Which completed checkpoints are too old to be kept: newer ones subsume them (Flink's `CheckpointSubsumeHelper`).

`sink_commits.py` calls `subsume` after each commit. Rules:

- The newest ones stay: as many as are retained, and all whose sink files are not committed yet, because a restore
  commits them. So what is kept is bounded even if the sinks always lag behind.
- A damaged checkpoint goes once there is a newer one that is whole.
- If all are damaged, nothing goes: the job fails, and what there is stays.
- `discards.py` deletes, and only with the permit that nothing retained refers to the files.
"""

from __future__ import annotations

from tidegate.actors.coordinator.checkpoints.discards import Discarder
from tidegate.actors.coordinator.state.coordinator_context import CoordinatorContext


def subsume(context: CoordinatorContext, discards: Discarder) -> None:
    """Give up the completed checkpoints that nobody needs any more."""
    state = context.state
    if not state.completed:
        return
    kept = max(context.settings.retained, len(state.commits))
    subsumed, state.completed = state.completed[:-kept], state.completed[-kept:]
    for checkpoint in subsumed:
        discards.subsumed(checkpoint.checkpoint_id)
    newest = state.completed[-1].checkpoint_id
    superfluous = [d.checkpoint_id for d in state.damaged if d.checkpoint_id < newest]
    state.damaged = tuple(d for d in state.damaged if d.checkpoint_id > newest)
    for checkpoint_id in superfluous:
        discards.subsumed(checkpoint_id)
