"""Permits: nobody but the decision makes one, and nothing that cannot be taken back goes without."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import tidegate
from tidegate.actors.coordinator import instructions as do
from tidegate.storage.checkpoints.permits import (
    _DECIDED,
    CommitPermit,
    CompletionPermit,
    DeletePermit,
    ExportPermit,
    _Decision,
)
from tidegate.storage.errors import InvariantError
from tidegate.storage.ids import CheckpointId, JobId

PACKAGE = Path(tidegate.__file__).parent
ONE = CheckpointId(1)
PERMITS = (ExportPermit, CompletionPermit, CommitPermit, DeletePermit)

CALLS = {
    "WriteSavepoint": "do.WriteSavepoint('target', metadata",
    "WriteMetadata": "do.WriteMetadata(metadata",
    "CommitSinks": "do.CommitSinks(ONE, ()",
    "DiscardCheckpoint": "do.DiscardCheckpoint(ONE, False",
    "DiscardSavepoint": "do.DiscardSavepoint('target', JobId('job'), ONE",
    "DiscardFiles": "do.DiscardFiles(ONE, ()",
    "write_savepoint": "savepoints.write_savepoint(opened, 'root', 'target', metadata",
    "discard_savepoint": "savepoints.discard_savepoint(opened, 'target', JobId('job')",
    "sweep_checkpoints": "deletion.sweep_checkpoints(store, layout",
    "_delete": "deletion._delete(store, pointer, metadata",
    "_delete_savepoint": "deletion._delete_savepoint(store, pointer, metadata",
    "_delete_orphans": "sweeper._delete_orphans(store, orphans=()",
    "_void_incomplete": "sweeper._void_incomplete(store, orphans=(), now_ms=0",
    "write_metadata": "effects.CoordinatorEffects.write_metadata(here, metadata",
    "sweep": "effects.CoordinatorEffects.sweep(here",
}
"""What cannot be taken back, without what allows it: instructions, and functions that touch files."""

HEAD = """
from typing import Any
from tidegate.storage.checkpoints import permits
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.drivers import coordinator_effects as effects
from tidegate.recovery import savepoints
from tidegate.recovery import deletion, sweeper
from tidegate.storage.ids import CheckpointId, JobId
ONE = CheckpointId(1)
def act(metadata: Any, opened: Any, store: Any, layout: Any, pointer: Any, here: Any, export: permits.ExportPermit,
        completion: permits.CompletionPermit, commit: permits.CommitPermit, delete: permits.DeletePermit,
        end: permits.EndPermit, orphan: permits.OrphanPermit) -> None:
"""
_RECOVERY = ("export", "delete", "end", "delete", "delete", "orphan", "orphan", "completion", "end")
RIGHT = ("export", "completion", "commit", "delete", "delete", "delete", *_RECOVERY)
WRONG = (
    "delete",
    "export",
    "completion",
    "commit",
    "commit",
    "commit",
    *("orphan" if permit != "orphan" else "end" for permit in _RECOVERY),
)


def errors_of_mypy(folder: Path, lines: list[str]) -> list[str]:
    """What mypy says of each of these lines. It looks at the instructions and the permits, and at nothing else."""
    snippet = folder / "snippet.py"
    snippet.write_text(HEAD + "".join(f"    {line}\n" for line in lines))
    files = (
        "tidegate/actors/coordinator/instructions.py", "tidegate/actors/drivers/coordinator_effects.py",
        "tidegate/recovery/deletion.py", "tidegate/recovery/sweeper.py", "tidegate/recovery/savepoints.py",
        "tidegate/storage/checkpoints/permits.py", "tidegate/storage/ids.py",
    )  # fmt: skip
    options = "--config-file=", "--follow-imports=skip", "--no-site-packages", "--cache-dir=/dev/null"
    result = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(snippet), *files],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    found = {}
    for line in result.stdout.splitlines():
        place, _, text = line.partition(": error: ")
        if place.startswith(str(snippet)):
            found[int(place.rpartition(":")[2])] = text
    first = HEAD.count("\n") + 1
    return [found.get(first + index, "") for index in range(len(lines))]


@pytest.mark.slow
def test_without_the_right_permit_the_types_are_wrong(tmp_path: Path) -> None:
    """No permit, another one, or something that is none: mypy refuses each, for every instruction."""
    calls = list(CALLS.values())
    lines = [f"{call})" for call in calls]
    lines += [f"{call}, permit={permit})" for call, permit in zip(calls, WRONG, strict=True)]
    lines += [f"{call}, permit=object())" for call in calls]
    lines += [f"permits.{cls.__name__}(object(), ONE)" for cls in PERMITS]
    lines += [f"{call}, permit={permit})" for call, permit in zip(calls, RIGHT, strict=True)]
    found = errors_of_mypy(tmp_path, lines)

    bad, good = found[: -len(calls)], found[-len(calls) :]
    assert [error for error in good if error] == []
    assert [line for line, error in zip(lines, bad, strict=False) if not error] == []
    missing = bad[: len(calls)]
    assert [error for error in missing if 'argument "permit"' not in error] == []


@pytest.mark.parametrize("cls", PERMITS)
@pytest.mark.parametrize(
    ("forge", "error"),
    [
        (lambda permit: type(permit)(checkpoint_id=ONE), TypeError),
        (lambda permit: type(permit)(object(), ONE), InvariantError),
        (lambda permit: type(permit)(_Decision(), ONE), InvariantError),
        (lambda permit: permit.check(CheckpointId(2)), InvariantError),
        (lambda permit: dataclasses.replace(permit, checkpoint_id=CheckpointId(2)), (TypeError, ValueError)),
        (copy.copy, TypeError),
        (pickle.dumps, TypeError),
        (lambda permit: setattr(permit, "checkpoint_id", 2), dataclasses.FrozenInstanceError),
    ],
)
def test_a_permit_is_not_forged(cls: type[Any], forge: Callable[[Any], object], error: type[Exception]) -> None:
    """Neither made without a decision, nor made of another one, nor kept for later."""
    permit = cls(_DECIDED, ONE)
    assert permit == cls(_DECIDED, ONE)
    permit.check(ONE)
    with pytest.raises(error):
        forge(permit)


def test_the_invariants_alone_decide() -> None:
    """What makes permits is named in the module that defines it, and in the one that looks first."""
    named = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if "_DECIDED" in path.read_text()}
    decide = {"actors/coordinator/invariants.py", "recovery/deletion_permits.py"}
    assert named == {*decide, "storage/checkpoints/permits.py"}


def test_the_permit_of_another_checkpoint_makes_no_instruction() -> None:
    """A wrong pairing is an error at once, not a deletion of the wrong files."""
    two, metadata = CheckpointId(2), SimpleNamespace(checkpoint_id=CheckpointId(2))
    for make in (
        lambda: do.DiscardCheckpoint(two, False, permit=DeletePermit(_DECIDED, ONE)),
        lambda: do.DiscardFiles(two, (), permit=DeletePermit(_DECIDED, ONE)),
        lambda: do.DiscardSavepoint("target", JobId("job"), two, permit=DeletePermit(_DECIDED, ONE)),
        lambda: do.CommitSinks(two, (), permit=CommitPermit(_DECIDED, ONE)),
        lambda: do.WriteMetadata(cast(Any, metadata), permit=CompletionPermit(_DECIDED, ONE)),
        lambda: do.WriteSavepoint("target", cast(Any, metadata), permit=ExportPermit(_DECIDED, ONE)),
    ):
        with pytest.raises(InvariantError, match="of checkpoint 1 is used for checkpoint 2"):
            make()
