"""What a subtask has in a checkpoint is known by all of its files, so that none is missed, left behind or swept."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

from tidegate.storage.checkpoints.metadata import NativeFile, NativeState, StateHandle, SubtaskState
from tidegate.storage.ids import OperatorUid, SubtaskIndex, VertexId


def value_of(name: str, hint: Any) -> Any:
    """A value for a field that may refer to files: one file, whose path is the field's name. None for any other."""
    handle = StateHandle(name, None, 9, "xxh3:1", ())
    native = NativeState(OperatorUid("u"), "rocksdb", (0, 8), b"", (NativeFile("f", name, 9, "xxh3:1", None),))
    known = {
        StateHandle | None: handle,
        tuple[StateHandle, ...]: (handle,),
        tuple[NativeState, ...]: (native,),
    }
    is_plain = "StateHandle" not in str(hint) and "Native" not in str(hint)
    assert hint in known or is_plain, f"{name}: {hint} is new here"
    return known.get(hint)


def full() -> tuple[SubtaskState, list[str]]:
    """A subtask with a file in each field that may have one, and their paths."""
    values = {name: value_of(name, hint) for name, hint in get_type_hints(SubtaskState).items()}
    given = {field.name: values[field.name] for field in fields(SubtaskState) if values[field.name] is not None}
    return SubtaskState(VertexId("v"), SubtaskIndex(0), **{"handle": None, **given}), sorted(given)


def test_every_file_is_among_the_paths() -> None:
    """Verifying, copying and sweeping go by `paths`: a file that is not there is never read, and deleted as garbage."""
    state, named = full()
    assert len(named) >= 4
    assert sorted(state.paths) == named
    assert state.size_bytes == 9 * len(named)


def test_a_savepoint_gets_every_file_under_its_new_path() -> None:
    """A field that `moved` forgets leaves a savepoint that needs files of the job's checkpoints."""
    state, named = full()
    assert sorted(state.moved(lambda path: f"copy/{path}").paths) == [f"copy/{name}" for name in named]
