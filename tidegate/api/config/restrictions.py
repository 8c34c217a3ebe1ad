"""Keys of Flink that tidegate does not support, with the reason. The error shows it to users who set such a key.

Rules:

- A key for behaviour that tidegate always has may be given, but only with the value that describes this behaviour
  (`FIXED`).
- All other keys are errors (`REFUSED`, by the key or by its beginning), with the reason and, if there is one, the
  setting to use instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

FIXED: Mapping[str, tuple[bool, str]] = MappingProxyType(
    {
        "execution.checkpointing.checkpoints-after-tasks-finish.enabled": (
            True,
            "a job always takes them, because otherwise its last rows would never be committed",
        ),
        "execution.checkpointing.unaligned.forced": (
            False,
            "it has no effect, because execution.checkpointing.unaligned is never switched off automatically",
        ),
        "execution.checkpointing.file-merging.enabled": (
            False,
            "each subtask writes a file of its own; for small state see execution.checkpointing.data-inline-threshold",
        ),
        "state.checkpoints.create-subdir": (True, "each job has a folder of its own under state.checkpoints.dir"),
        "execution.checkpointing.create-subdir": (True, "each job has a folder of its own under state.checkpoints.dir"),
        "pipeline.watermark-alignment.allow-unaligned-source-splits": (
            False,
            "splits of every source wait on their own: see alignment= of assign_timestamps",
        ),
        "state.backend.async": (True, "state is always written while the job continues"),
    }
)
"""For each of these keys, the only value that it may have, and the reason."""

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "state.storage.fs.write-buffer-size": "state goes to storage in the chunks in which it was made; there is no "
        "buffer whose size could be chosen",
        "execution.checkpointing.write-buffer-size": "state goes to storage in the chunks in which it was made; there "
        "is no buffer whose size could be chosen",
        "execution.checkpointing.interval-during-backlog": "sources do not report a backlog",
        "execution.checkpointing.alignment-timeout": "its name is execution.checkpointing.aligned-checkpoint-timeout",
        "execution.checkpointing.savepoint.format": "the format is chosen with each savepoint "
        "(`job.savepoint(format=...)`, `tidegate job NAME savepoint --format`)",
        "execution.checkpointing.unaligned.max-subtasks-per-channel-state-file": "each subtask writes its data in "
        "flight into a file of its own",
        "execution.checkpointing.cleaner.": "files of old checkpoints are always deleted while the job continues",
        "execution.checkpointing.snapshot-compression-": "the level of compression cannot be chosen",
        "execution.attached": "write execution.detached, which has the opposite meaning",
        "execution.runtime-mode": "a job whose sources end is a stream that ends; there is no other mode",
        "execution.savepoint-restore-mode": "a savepoint is only read by the job that starts from it, and belongs to "
        "its user (Flink's NO_CLAIM)",
        "execution.state-recovery.claim-mode": "a savepoint is only read by the job that starts from it, and belongs "
        "to its user (Flink's NO_CLAIM)",
        "state.backend.rocksdb.": "tidegate has only these settings of RocksDB: memory.fixed-per-slot, localdir, "
        "row-cache-size, thread.num, writebuffer.size, block.blocksize and files.open",
        "state.backend.forst.": "there is no ForSt backend; state.backend.type is columnar or rocksdb",
        "state.backend.changelog.": "the switch is state.changelog.enabled",
        "state.changelog.": "changes are written all the time, in segments (state.changelog.segment-size), to the "
        "checkpoint storage; nothing is materialized on a timer",
        "dstl.": "changes of state are written to the checkpoint storage, in segments (state.changelog.segment-size)",
        "state.backend.latency-track.": "reads and writes of state are not measured one by one",
        "state.backend.heap.": "state in memory has no managed part",
        "state.checkpoint-storage.": "the storage is filesystem or jobmanager",
        "state.ttl.": "each state declares how long its values live (`ttl=`)",
        "taskmanager.memory.": "the memory of processes is Ray's and Spark's: reserve it with resources=, "
        "spark.executor.memory and ray.object-store-memory; the memory of RocksDB is "
        "state.backend.rocksdb.memory.fixed-per-slot",
        "jobmanager.memory.": "the coordinator is an actor of Ray, whose memory Ray does not limit",
        "taskmanager.network.": "channels are calls between actors of Ray, and sockets between actors on one node "
        "(taskmanager.network.channel-socket.enabled); their sizes are "
        "taskmanager.network.memory.channel-credit, taskmanager.network.memory.channel-queue, "
        "taskmanager.network.memory.shm-per-channel and "
        "taskmanager.network.frame.max-size",
        "taskmanager.": "there are no task managers: tasks are actors of Ray",
        "jobmanager.": "there is no job manager: the coordinator is an actor of Ray",
        "kubernetes.": "on Kubernetes the cluster is KubeRay's: see configs/kuberay",
        "yarn.": "on YARN the cluster is Spark's: see docs/topologies.md",
        "high-availability.": "Ray starts a lost coordinator again, which reads its state from the event log; no other "
        "store is needed (high-availability.lease-duration is the time after which a job counts as dead)",
        "metrics.": "metrics are published through Ray, which exports them: see docs/metrics.md",
        "security.": "there is no Kerberos; tokens are Ray's: see docs/security.md",
        "table.": "SQL has no settings of its own: see docs/sql.md",
        "python.": "jobs run in the Python that starts them",
    }
)
"""The reason why a key is not supported.

An entry that ends in a dot or a dash applies to all keys with this beginning. The longest matching entry applies.
"""


def refusal_of(key: str) -> str | None:
    """Returns the reason why a key of Flink is not supported, or None if the key is not in `REFUSED`."""
    if key in REFUSED:
        return REFUSED[key]
    beginnings = [start for start in REFUSED if start[-1] in ".-" and key.startswith(start)]
    return REFUSED[max(beginnings, key=len)] if beginnings else None
