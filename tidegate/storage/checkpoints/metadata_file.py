"""Creates and reads `_metadata`. Creating it is what completes a checkpoint, and it is created exactly once.

It is one sealed file with the codec's bytes of `CheckpointMetadata`. Reading it checks that it belongs where
it lies.
"""

from __future__ import annotations

from tidegate.storage.checkpoints.layout import METADATA_NAME, CheckpointLayout, CheckpointPointer
from tidegate.storage.checkpoints.metadata import METADATA_VERSION, CheckpointMetadata
from tidegate.storage.codec import decode, encode
from tidegate.storage.errors import CodecError, CorruptionError, NotFoundError
from tidegate.storage.files.envelope import seal, unseal
from tidegate.storage.files.file_system_store import join_url
from tidegate.storage.files.store import Buffer, Store
from tidegate.storage.ids import CheckpointId, JobId

MAGIC = b"TGCKMETA"


def encode_metadata(metadata: CheckpointMetadata) -> bytes:
    """Bytes of a `_metadata` file."""
    return seal(MAGIC, metadata.version, encode(metadata))


def decode_metadata(data: Buffer, where: str = "_metadata") -> CheckpointMetadata:
    """Inverse of `encode_metadata`. CorruptionError for damage, CodecError for another version."""
    metadata = decode(unseal(MAGIC, METADATA_VERSION, data, where, version_min=METADATA_VERSION))
    if not isinstance(metadata, CheckpointMetadata):
        raise CodecError(f"{where} holds a {type(metadata).__name__}, not the metadata of a checkpoint")
    return metadata


def create_metadata(store: Store, metadata: CheckpointMetadata) -> None:
    """Complete (or void) a checkpoint. Raises AlreadyExistsError if it was completed or voided before."""
    path = CheckpointLayout(metadata.job_id).metadata(metadata.checkpoint_id)
    store.create(path, encode_metadata(metadata))


def read_metadata(
    store: Store, job_id: JobId, checkpoint_id: CheckpointId, *, savepoint: bool = False, deleted: bool = False
) -> CheckpointMetadata:
    """Read and check `_metadata`, of a `savepoint` from the root of its store.

    NotFoundError if there is none, or only what a deletion has left, unless that is wanted: `deleted`. CorruptionError
    for damage.
    """
    path = METADATA_NAME if savepoint else CheckpointLayout(job_id).metadata(checkpoint_id)
    where = join_url(store.url, path)
    metadata = decode_metadata(store.read(path), where)
    if (metadata.job_id, metadata.checkpoint_id) != (job_id, checkpoint_id):
        raise CorruptionError(
            f"{where} is the metadata of checkpoint {metadata.checkpoint_id} of {metadata.job_id}: it was copied here"
        )
    if metadata.deleted and not deleted:
        raise NotFoundError(f"{where} says that this was deleted, and not to the end: delete it again")
    return metadata


def read_pointed(store: Store, at: CheckpointPointer) -> CheckpointMetadata:
    """`read_metadata` of what a pointer names; `store` is opened at its root."""
    return read_metadata(store, at.job_id, at.checkpoint_id, savepoint=at.savepoint)
