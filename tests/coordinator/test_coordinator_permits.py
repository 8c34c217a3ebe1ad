"""Permits: nobody but the decision makes one, and nothing that cannot be taken back goes without."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tidegate.actors.coordinator.permits import (
    _DECIDED,
    CommitPermit,
    CompletionPermit,
    DeletePermit,
    ExportPermit,
    _Decision,
)
from tidegate.storage.errors import InvariantError
from tidegate.storage.ids import CheckpointId

PACKAGE = Path(tidegate.__file__).parent
ONE = CheckpointId(1)
PERMITS = (ExportPermit, CompletionPermit, CommitPermit, DeletePermit)

CALLS = {
    "WriteSavepoint": "do.WriteSavepoint('target', metadata",
    "WriteMetadata": "do.WriteMetadata(metadata",
    "CommitSinks": "do.CommitSinks(ONE, ()",
    "DiscardCheckpoint": "do.DiscardCheckpoint(ONE, False",
    "DiscardSavepoint": "do.DiscardSavepoint('target', JobId('job'), ONE",
    "DiscardFiles": "do.DiscardFiles(()",
}
"""Instructions that cannot be taken back, without what allows them."""

HEAD = """
from typing import Any
from tidegate.actors.coordinator import permits
from tidegate.actors.coordinator.messages import instructions as do
from tidegate.storage.ids import CheckpointId, JobId
ONE = CheckpointId(1)
def act(metadata: Any, export: permits.ExportPermit, completion: permits.CompletionPermit,
        commit: permits.CommitPermit, delete: permits.DeletePermit) -> None:
"""
RIGHT = ("export", "completion", "commit", "delete", "delete", "delete")
WRONG = ("delete", "export", "completion", "commit", "commit", "commit")


def errors_of_mypy(folder: Path, lines: list[str]) -> list[str]:
    """What mypy says of each of these lines. It looks at the instructions and the permits, and at nothing else."""
    snippet = folder / "snippet.py"
    snippet.write_text(HEAD + "".join(f"    {line}\n" for line in lines))
    files = "actors/coordinator/messages/instructions.py", "actors/coordinator/permits.py", "storage/ids.py"
    options = "--config-file=", "--follow-imports=skip", "--no-site-packages", "--cache-dir=/dev/null"
    result = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(snippet), *(f"tidegate/{file}" for file in files)],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    found = {}
    for line in result.stdout.splitlines():
        place, _, text = line.partition(": error: ")
        if place.startswith(str(snippet)):
            found[int(place.rpartition(":")[2])] = text
    first = HEAD.count("\n") + 1
    return [found.get(first + index, "") for index in range(len(lines))]


def test_without_the_right_permit_the_types_are_wrong(tmp_path: Path) -> None:
    """No permit, another one, or something that is none: mypy refuses each, for every instruction."""
    calls = list(CALLS.values())
    lines = [f"{call})" for call in calls]
    lines += [f"{call}, permit={permit})" for call, permit in zip(calls, WRONG, strict=True)]
    lines += [f"{call}, permit=object())" for call in calls]
    lines += [f"permits.{cls.__name__}(ONE, object())" for cls in PERMITS]
    lines += [f"{call}, permit={permit})" for call, permit in zip(calls, RIGHT, strict=True)]
    found = errors_of_mypy(tmp_path, lines)

    bad, good = found[: -len(calls)], found[-len(calls) :]
    assert [error for error in good if error] == []
    assert [line for line, error in zip(lines, bad, strict=False) if not error] == []
    assert bad[: len(calls)] == [f'Missing named argument "permit" for "{name}"  [call-arg]' for name in CALLS]


@pytest.mark.parametrize("cls", PERMITS)
@pytest.mark.parametrize(
    ("forge", "error"),
    [
        (lambda permit: type(permit)(ONE), TypeError),
        (lambda permit: type(permit)(ONE, object()), InvariantError),
        (lambda permit: type(permit)(ONE, _Decision()), InvariantError),
        (lambda permit: dataclasses.replace(permit, checkpoint_id=CheckpointId(2)), (TypeError, ValueError)),
        (copy.copy, TypeError),
        (pickle.dumps, TypeError),
        (lambda permit: setattr(permit, "checkpoint_id", 2), dataclasses.FrozenInstanceError),
    ],
)
def test_a_permit_is_not_forged(cls: type[Any], forge: Callable[[Any], object], error: type[Exception]) -> None:
    """Neither made without a decision, nor made of another one, nor kept for later."""
    permit = cls(ONE, _DECIDED)
    assert permit == cls(ONE, _DECIDED)
    with pytest.raises(error):
        forge(permit)


def test_the_invariants_alone_decide() -> None:
    """What makes permits is named in the module that defines it, and in the one that looks first."""
    named = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if "_DECIDED" in path.read_text()}
    assert named == {"actors/coordinator/invariants.py", "actors/coordinator/permits.py"}
