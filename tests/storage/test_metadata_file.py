"""`_metadata` completes a checkpoint once, comes back as it was, and hides no damage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tidegate.storage.checkpoints.layout import CheckpointLayout
from tidegate.storage.checkpoints.metadata import (
    METADATA_VERSION,
    CheckpointMetadata,
    OperatorInfo,
    SectionRef,
    StateHandle,
    StateKind,
    SubtaskState,
    create_metadata,
    decode_metadata,
    encode_metadata,
    read_metadata,
)
from tidegate.storage.errors import AlreadyExistsError, CodecError, CorruptionError, NotFoundError
from tidegate.storage.files.envelope import seal
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId, OperatorUid, SubtaskIndex, VertexId

_JOB = JobId("demo-1a2b3c4d")
_SECTION = SectionRef(OperatorUid("u"), "s", StateKind.KEYED, 64, 10, 2)
_METADATA = CheckpointMetadata(
    version=METADATA_VERSION,
    job_id=_JOB,
    job_name="demo",
    checkpoint_id=CheckpointId(7),
    attempt=AttemptNumber(2),
    triggered_at_ms=1_700_000_000_000,
    operators=(OperatorInfo(OperatorUid("u"), "count", VertexId("u"), 2, 128),),
    subtasks=(SubtaskState(VertexId("u"), SubtaskIndex(0), StateHandle(None, b"x" * 9, 9, "xxh3:1", (_SECTION,))),),
)


def test_comes_back(memory_store: FileSystemStore) -> None:
    """What was created is read, and lies where the layout says."""
    create_metadata(memory_store, _METADATA)

    assert read_metadata(memory_store, _JOB, CheckpointId(7)) == _METADATA
    assert memory_store.exists(f"{_JOB}/chk-7/_metadata")


def test_completes_once(store: FileSystemStore) -> None:
    """On every store the second to complete a checkpoint loses, and what the first said stays."""
    create_metadata(store, _METADATA)

    with pytest.raises(AlreadyExistsError):
        create_metadata(store, replace(_METADATA, void=True))
    assert not read_metadata(store, _JOB, CheckpointId(7)).void


def test_what_was_never_completed_is_not_found(memory_store: FileSystemStore) -> None:
    """A checkpoint without metadata is NotFoundError."""
    with pytest.raises(NotFoundError, match="chk-8/_metadata"):
        read_metadata(memory_store, _JOB, CheckpointId(8))


def test_every_flipped_bit_and_every_truncation_is_found() -> None:
    """No damage to any byte gets as far as the codec, and none changes what is read."""
    whole = encode_metadata(_METADATA)

    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        for damaged in (bytes(flipped), whole[:position], whole + whole[: position + 1]):
            with pytest.raises(CorruptionError, match="somewhere is damaged"):
                decode_metadata(damaged, "somewhere")


def test_metadata_in_the_wrong_place_is_damage(memory_store: FileSystemStore) -> None:
    """A copied checkpoint folder is no checkpoint: its state files' paths name another one."""
    memory_store.create(CheckpointLayout(_JOB).metadata(CheckpointId(9)), encode_metadata(_METADATA))

    with pytest.raises(CorruptionError, match="metadata of checkpoint 7"):
        read_metadata(memory_store, _JOB, CheckpointId(9))


@pytest.mark.parametrize("version", [METADATA_VERSION - 1, METADATA_VERSION + 1])
def test_another_version_is_named_as_such(version: int) -> None:
    """An intact file of another format is not called damaged, and not misread."""
    with pytest.raises(CodecError, match=f"_metadata has format version {version}, and .* reads version 5"):
        decode_metadata(seal(b"TGCKMETA", version, b"whatever"))


def test_another_value_is_no_metadata() -> None:
    """A sealed file that holds something else is refused by its type."""
    with pytest.raises(CodecError, match="holds a NoneType"):
        decode_metadata(seal(b"TGCKMETA", METADATA_VERSION, b"\xc0"))
