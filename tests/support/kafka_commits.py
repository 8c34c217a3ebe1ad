"""Commits to Kafka for tests: prepared records in a folder, what readers see, and a process that commits and dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path

import pyarrow as pa
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition
from waiting import LIMIT_S

from tidegate.connectors.committing_sink import Committable, CommittingContext, CommitToken
from tidegate.connectors.kafka import producer, transactions
from tidegate.connectors.kafka.sink import KafkaSink, KafkaTarget
from tidegate.connectors.kafka.transactions import LaneCommitter, TokenTopic

STEPS = ("init_transactions", "read_token", "begin_transaction", "records", "token", "commit_transaction", "committed")
"""The steps of a commit at which a process can be stopped: before each of the first six, and after the last."""
Record = tuple[bytes | None, bytes | None]


class FolderFiles:
    """Files of a sink in a folder, which other processes can read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, chunks: Iterable[bytes | memoryview]) -> str:
        """Write a file with a new name."""
        path = self.folder / uuid.uuid4().hex
        path.write_bytes(b"".join(chunks))
        return str(path)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read a file, or a part of it."""
        data = Path(path).read_bytes()[offset:]
        return data if length is None else data[:length]


def context_of(
    folder: Path, *, job: str = "job-1", subtask: int = 0, parallelism: int = 1, attempt: int = 0
) -> CommittingContext:
    """Return the context of a subtask, with its share of 128 buckets. Each folder has jobs of its own."""
    job = f"{folder.name}-{job}"
    share = 128 // parallelism
    buckets = range(subtask * share, (subtask + 1) * share)
    return CommittingContext(
        job, "a job", "sink", "to_kafka", subtask, parallelism, attempt, buckets, FolderFiles(folder)
    )


def records_of(values: Sequence[str], key: str = "k") -> pa.RecordBatch:
    """Return records with these values."""
    keys = pa.array([key.encode()] * len(values), pa.binary())
    return pa.RecordBatch.from_arrays([keys, pa.array([value.encode() for value in values])], names=["key", "value"])


def prepared(target: KafkaTarget, context: CommittingContext, checkpoint: int, *values: str) -> Sequence[Committable]:
    """Return what a writer has prepared of these values."""
    writer = KafkaSink(target).open_writer(context)
    writer.write(records_of(values))
    found = writer.prepare(checkpoint)
    writer.close()
    return found


def commit(
    target: KafkaTarget, context: CommittingContext, checkpoint: int, committables: Sequence[Committable]
) -> None:
    """Commit as a subtask that has just started does."""
    with closing(KafkaSink(target).open_committer(context)) as committer:
        committer.commit(CommitToken(context.job_id, checkpoint), committables)


def read(servers: str, topic: str, isolation: str = "read_committed", *, wait: bool = True) -> list[Record]:
    """Return the keys and values of all records that a reader sees up to the end, which is taken now.

    The marks of a transaction are written after its commit has returned, so a reader may have to wait for them. Without
    `wait` it ends where an open transaction holds it up.
    """
    settings = {
        "bootstrap.servers": servers,
        "group.id": "tests",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "isolation.level": isolation,
        # How long the broker holds back the answer that there are no more records.
        "fetch.wait.max.ms": 10,
        "log_level": 0,
    }
    found: list[Record] = []
    with closing(Consumer(settings)) as reader:
        partitions = reader.list_topics(topic, timeout=LIMIT_S).topics[topic].partitions
        reader.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in partitions])
        ends = _ends(settings, topic, partitions) if wait else dict.fromkeys(partitions, 0)
        left = set(partitions)
        while left:
            message = reader.poll(LIMIT_S)
            assert message is not None, f"no end of {topic}"
            error = message.error()
            if error is None:
                found.append((message.key(), message.value()))
            else:
                assert error.code() == KafkaError._PARTITION_EOF, error
                partition, offset = message.partition(), message.offset()
                assert partition is not None
                assert offset is not None
                if offset >= ends[partition]:
                    left.discard(partition)
    return found


def _ends(settings: dict[str, object], topic: str, partitions: Iterable[int]) -> dict[int, int]:
    with closing(Consumer({**settings, "isolation.level": "read_uncommitted"})) as asked:
        return {
            partition: asked.get_watermark_offsets(TopicPartition(topic, partition), timeout=LIMIT_S)[1]
            for partition in partitions
        }


def values_of(records: Iterable[Record]) -> list[str]:
    """Return the values as texts, sorted."""
    return sorted("" if value is None else value.decode() for _, value in records)


def stop_at(step: str, stop: Callable[[], None]) -> None:
    """Call `stop` in this process when a commit reaches a step. Every step before it is at the brokers then."""
    call, opened, sent, transaction = (
        LaneCommitter._call,
        transactions.read_token,
        producer.send,
        LaneCommitter._transaction,
    )
    count = 0

    def before(name: str) -> None:
        if name == step:
            stop()

    def patched_call(self: LaneCommitter, doing: str, fn: Callable[[float], object]) -> None:
        before(fn.__name__)
        call(self, doing, fn)

    def patched_read(*args: object, **kwargs: object) -> object:
        before("read_token")
        return opened(*args, **kwargs)  # type: ignore[arg-type]

    def patched_send(producer: object, *args: object) -> None:
        nonlocal count
        before("records" if count == 0 else "token")
        count += 1
        sent(producer, *args)  # type: ignore[arg-type]
        producer.flush(LIMIT_S)  # type: ignore[attr-defined]

    def patched_transaction(self: LaneCommitter, parts: Sequence[transactions.Part]) -> None:
        before("begin_transaction")
        transaction(self, parts)
        before("committed")

    for owner, name, patched in (
        (LaneCommitter, "_call", patched_call),
        (LaneCommitter, "_transaction", patched_transaction),
        (transactions, "read_token", patched_read),
        (transactions, "send", patched_send),
    ):
        setattr(owner, name, patched)


class CommittingProcess:
    """A process that commits and stops itself at a step: by SIGKILL, or by SIGSTOP, so that it can come back."""

    def __init__(self, target: KafkaTarget, folder: Path, checkpoint: int, values: Sequence[str], step: str, sig: int):
        tokens = target.tokens
        assert tokens is not None
        assert target.topic is not None
        given = {
            "servers": target.servers,
            "topic": target.topic,
            "tokens": [tokens.name, tokens.topic_id, tokens.partitions],
            "folder": str(folder),
            "checkpoint": checkpoint,
            "step": step,
            "signal": sig,
        }
        context = context_of(folder)
        self.committables = prepared(target, context, checkpoint, *values)
        given["committables"] = [[each.bucket, each.data.hex(), list(each.files)] for each in self.committables]
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(given)], stdout=subprocess.PIPE, env=dict(os.environ)
        )

    def wait_until_stopped(self) -> None:
        """Wait until the process has killed or stopped itself."""
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            assert os.WIFSIGNALED(status), f"the process has ended by itself: {status}"
            self.process.returncode = -os.WTERMSIG(status)

    def resume(self) -> str:
        """Let a stopped process continue, and return what it prints at its end."""
        self.process.send_signal(signal.SIGCONT)
        out, _ = self.process.communicate(timeout=LIMIT_S)
        return out.decode()

    def close(self) -> None:
        """End the process if it still runs."""
        if self.process.returncode is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def main() -> None:
    """Commit what the first argument describes, and print how that ended, twice: the second try is a repetition."""
    given = json.loads(sys.argv[1])
    stopped = False

    def stop() -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            os.kill(os.getpid(), given["signal"])

    stop_at(given["step"], stop)
    target = KafkaTarget(given["servers"], given["topic"], tokens=TokenTopic(*given["tokens"]))
    context = context_of(Path(given["folder"]))
    committables = [
        Committable(bucket, bytes.fromhex(data), tuple(files)) for bucket, data, files in given["committables"]
    ]
    committer = KafkaSink(target).open_committer(context)
    for _ in range(2):
        try:
            committer.commit(CommitToken(context.job_id, given["checkpoint"]), committables)
            print("committed")
        except producer.KafkaWriteError as error:
            print(f"failed: {error}")


if __name__ == "__main__":
    main()
