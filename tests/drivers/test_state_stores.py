"""What a task keeps on its node's disk of its checkpoints and its changelog, and for how long."""

from __future__ import annotations

from pathlib import Path

from restored_graphs import BY_KEY, JOB, graph_of

from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.drivers.task_effects import StateStores
from tidegate.actors.task.incremental_base import ChangeLog
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.layout import CheckpointLayout
from tidegate.storage.checkpoints.metadata import StateHandle
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import AttemptNumber, CheckpointId, SubtaskIndex, VertexId
from tidegate.storage.state.local_copies import PrivateFolder

COUNT = TaskId(VertexId("count"), SubtaskIndex(1))
GRAPH = graph_of({"source": 1, "count": 2}, ("source", "count", BY_KEY))
LAYOUT = CheckpointLayout(JOB)
ONE, TWO, THREE = (CheckpointId(number) for number in (1, 2, 3))


def test_copies_of_the_changelog_outlast_a_first_checkpoint_that_fails(tmp_path: Path) -> None:
    """They belong to no checkpoint before one is complete that needs them; those that none needs go then."""
    folder = PrivateFolder(str(tmp_path / "copies"))
    stores = StateStores(JobContext(JOB, "demo", str(tmp_path / "root"), GRAPH, {}), COUNT, open_store, 7, folder)

    def write(number: CheckpointId | None, path: str) -> str:
        stores.to_write(number).write(path, [b"state"])
        return path

    def copied() -> set[str]:
        return {path.name for path in (tmp_path / "copies").rglob("*") if path.is_file()}

    changelog = [
        write(None, LAYOUT.changelog_file(COUNT.vertex, COUNT.subtask, AttemptNumber(0), number, number == 1))
        for number in (1, 2)
    ]
    stores.wrote(ONE, frozenset({write(ONE, LAYOUT.state_file(ONE, COUNT.vertex, COUNT.subtask))}))
    stores.aborted(ONE)
    base, segment = (path.rpartition("/")[2] for path in changelog)
    later = write(None, LAYOUT.changelog_file(COUNT.vertex, COUNT.subtask, AttemptNumber(0), 3, False))
    assert {base, segment, later.rpartition("/")[2]} <= copied()

    needed = tuple(StateHandle(path, None, 5, "xxh3:0", ()) for path in (changelog[0], later))
    log = ChangeLog(needed)
    log.seal()
    chain = log.take()
    log.written(1, False, None)
    stores.wrote(TWO, frozenset({write(TWO, LAYOUT.state_file(TWO, COUNT.vertex, COUNT.subtask))}), chain)
    stores.completed(TWO)
    assert copied() == {base, later.rpartition("/")[2], "count-1"}

    write(THREE, LAYOUT.state_file(THREE, COUNT.vertex, COUNT.subtask))
    stores.aborted(THREE)
    assert copied() == {base, later.rpartition("/")[2], "count-1"}
