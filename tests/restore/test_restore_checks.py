"""A program that does not fit its checkpoint: everything that is wrong is said, in one error, at submission."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from restored_graphs import BROADCAST, BY_KEY, JOB, check_fits, checkpoint_of, graph_of, store_in_flight

from tidegate.actors.restore import restore_checks
from tidegate.actors.restore.restore_checks import misfits, refuse, with_key_groups_of
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, SectionRef, StateHandle, StateKind
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import OperatorUid

EDGE = ("source", "count", BY_KEY)
OLD = graph_of({"source": 1, "count": 2}, EDGE)


def handle(*states: str, uid: str = "count") -> StateHandle:
    """State of an operator, 100 bytes each."""
    sections = tuple(
        SectionRef(OperatorUid(uid), state, StateKind.KEYED, 100 * n, 100, 1) for n, state in enumerate(states)
    )
    return StateHandle("state", None, 100 * len(states), "", sections)


def old_checkpoint() -> CheckpointMetadata:
    """Two states of `count` in each of its subtasks."""
    return checkpoint_of(OLD, handles={("count", 0): handle("n", "sum"), ("count", 1): handle("n")})


def test_state_without_an_operator_says_what_there_is_and_what_may_be_meant() -> None:
    """The nearest uid is one that has no state in the checkpoint: one that has some is not the renamed operator."""
    graph = graph_of({"source": 1, "counts": 2, "sums": 2}, ("source", "counts", BY_KEY), ("source", "sums", BY_KEY))

    with pytest.raises(ConfigurationError) as refused:
        check_fits(old_checkpoint(), graph)

    text = str(refused.value)
    assert text.startswith(f"checkpoint 5 of {JOB} has state of operator 'count' ('count', 2 states, 300 bytes)")
    assert "(it has counts, source, sums)" in text
    assert "the nearest one that has no state there is 'counts'" in text
    assert "allow_non_restored_state=True" in text


def test_state_may_be_left_behind_by_consent() -> None:
    """Then nothing else that is wrong is forgiven."""
    graph = graph_of({"source": 1, "sums": 2}, ("source", "sums", BY_KEY))
    assert misfits(old_checkpoint(), graph, allow_non_restored_state=True) == []

    other = graph_of({"source": 1, "count": 2, "source2": 1}, EDGE, ("source2", "count", BY_KEY))
    finished = checkpoint_of(OLD, finished={"source": [0], "count": [0, 1]})
    assert len(misfits(finished, other, allow_non_restored_state=True)) == 1


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    """Who has changed much mends it in one go."""
    row = pa.record_batch({"k": [1]})
    old = checkpoint_of(
        OLD,
        handles={("count", 0): handle("n"), ("source", 0): handle("splits", uid="gone")},
        in_flight=store_in_flight(open_store(str(tmp_path)), "source", "count", {("input", 0, 0): [row]}),
    )
    graph = graph_of({"source": 1, "count": 2}, ("source", "count", BROADCAST), max_parallelism=32)

    with pytest.raises(ConfigurationError) as refused:
        check_fits(old, graph)

    first, *lines = str(refused.value).splitlines()
    assert first == f"3 things in the program do not fit checkpoint 5 of {JOB}:"
    assert [line[:3] for line in lines] == ["1. ", "2. ", "3. "]
    for line, said in zip(lines, ("state of operator 'gone'", "max_parallelism is 16", "in-flight rows"), strict=True):
        assert said in line


def test_what_is_said_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has nothing to do with the checkpoint is not told so a thousand times."""
    monkeypatch.setattr(restore_checks, "PROBLEMS_SHOWN_MAX", 2)
    with pytest.raises(ConfigurationError, match=r"^5 things in .*:\n1\. a\n2\. b\nand 3 more$"):
        refuse(old_checkpoint(), list("abcde"))


def test_the_number_of_key_groups_is_that_of_the_checkpoint() -> None:
    """Without it no key would be found in its group. More subtasks than groups cannot be."""
    wide = graph_of({"source": 1, "count": 2}, EDGE, max_parallelism=512)
    assert with_key_groups_of(old_checkpoint(), wide).max_parallelism == OLD.max_parallelism
    check_fits(old_checkpoint(), with_key_groups_of(old_checkpoint(), wide))
    with pytest.raises(ConfigurationError, match=r"max_parallelism is 16 in checkpoint 5 .* and 512 in the job"):
        check_fits(old_checkpoint(), wide)

    wider = graph_of({"source": 1, "count": 17}, EDGE, max_parallelism=512)
    with pytest.raises(ConfigurationError, match="'count': parallelism 17 is more than max_parallelism 16"):
        with_key_groups_of(old_checkpoint(), wider)
