"""Commits to Apache Kafka: each record once, whatever happens between two steps of a commit."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from kafka_commits import (
    STEPS,
    CommittingProcess,
    commit,
    context_of,
    prepared,
    read,
    records_of,
    values_of,
)
from kafka_server import KafkaServer
from waiting import LIMIT_S, until

from tidegate.connectors.committing_sink import CommitToken
from tidegate.connectors.kafka import producer as kafka_producer
from tidegate.connectors.kafka import sink as kafka_sink
from tidegate.connectors.kafka import topics, transactions
from tidegate.connectors.kafka.producer import KafkaWriteError, RecordProducer
from tidegate.connectors.kafka.sink import KafkaSink, KafkaTarget
from tidegate.connectors.kafka.transactions import Token, TokenTopic, read_token
from tidegate.storage.errors import ConfigurationError, CorruptionError
from tidegate.testing.sink_contract import check_committing_sink

pytestmark = pytest.mark.slow


def target(server: KafkaServer, topic: str, partitions: int = 1, **settings: object) -> KafkaTarget:
    """Return a checked target, with a new topic."""
    server.create(topic, partitions)
    found = KafkaTarget(server.servers, topic, **settings)  # type: ignore[arg-type]
    found.check()
    return found


def lane_of(folder: Path) -> str:
    """Return the lane of the first bucket of the first job of a test."""
    return f"{context_of(folder).job_id}/sink/0"


def stable_end(reader: Consumer, topic: str) -> int:
    """Return the offset up to which a reader of committed records gets. Each transaction has a mark at its end."""
    _, end = reader.get_watermark_offsets(TopicPartition(topic, 0), timeout=LIMIT_S)
    return end


def token_of(found: KafkaTarget, lane: str) -> Token | None:
    """Return the token of a lane."""
    assert found.tokens is not None
    return read_token(found.servers, {}, found.tokens, lane)


def test_prepared_records_are_invisible_until_the_commit(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """Readers of uncommitted records see none either: nothing is open at the brokers."""
    found = target(kafka_server, "invisible", 2)
    context = context_of(tmp_path)
    committables = prepared(found, context, 1, "a", "b", "c")
    assert read(found.servers, "invisible", "read_uncommitted") == []
    commit(found, context, 1, committables)
    assert values_of(read(found.servers, "invisible")) == ["a", "b", "c"]
    assert token_of(found, lane_of(tmp_path)) == Token(1, 1)


def test_a_repeated_commit_changes_nothing(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """By the same committer and by another one, of the last checkpoint and of an earlier one."""
    found = target(kafka_server, "repeated")
    context = context_of(tmp_path)
    first, second = prepared(found, context, 1, "a"), prepared(found, context, 2, "b")
    with closing(KafkaSink(found).open_committer(context)) as committer:
        for _ in range(2):
            committer.commit(CommitToken(context.job_id, 1), first)
        committer.commit(CommitToken(context.job_id, 2), second)
    for checkpoint, committables in ((2, second), (1, first), (2, second)):
        commit(found, context, checkpoint, committables)
    assert values_of(read(found.servers, "repeated")) == ["a", "b"]


@pytest.mark.parametrize("step", STEPS)
def test_a_process_that_is_killed_in_a_commit_loses_and_doubles_nothing(
    kafka_server: KafkaServer, tmp_path: Path, step: str
) -> None:
    """Wherever it is killed. Afterwards no transaction is open, so readers are not held up."""
    topic = f"killed-{step}"
    found = target(kafka_server, topic)
    commit(found, context_of(tmp_path), 1, prepared(found, context_of(tmp_path), 1, "before"))
    with closing(CommittingProcess(found, tmp_path, 2, ["a", "b"], step, signal.SIGKILL)) as killed:
        killed.wait_until_stopped()
        commit(found, context_of(tmp_path, attempt=1), 2, killed.committables)
    assert values_of(read(found.servers, topic)) == ["a", "b", "before"]
    later = prepared(found, context_of(tmp_path, attempt=1), 3, "later")
    commit(found, context_of(tmp_path, attempt=1), 3, later)
    assert values_of(read(found.servers, topic)) == ["a", "b", "before", "later"]


@pytest.mark.parametrize("step", ["begin_transaction", "token", "commit_transaction"])
def test_a_process_that_comes_back_writes_nothing(kafka_server: KafkaServer, tmp_path: Path, step: str) -> None:
    """It was stopped in a commit, another process has committed since, and it continues. Its repetition is harmless."""
    topic = f"zombie-{step}"
    found = target(kafka_server, topic)
    with closing(CommittingProcess(found, tmp_path, 1, ["a", "b"], step, signal.SIGSTOP)) as stopped:
        stopped.wait_until_stopped()
        context = context_of(tmp_path, attempt=1)
        with closing(KafkaSink(found).open_committer(context)) as committer:
            committer.commit(CommitToken(context.job_id, 1), stopped.committables)
            assert values_of(read(found.servers, topic)) == ["a", "b"]
            outcome = stopped.resume().splitlines()
            assert outcome[0].startswith("failed: could not commit checkpoint 1"), outcome
            assert outcome[1] == "committed"
            assert values_of(read(found.servers, topic)) == ["a", "b"]
            # The zombie has fenced this committer in turn, which finds out and continues.
            later = prepared(found, context, 2, "c")
            with pytest.raises(KafkaWriteError, match="could not commit checkpoint 2"):
                committer.commit(CommitToken(context.job_id, 2), later)
            committer.commit(CommitToken(context.job_id, 2), later)
    assert values_of(read(found.servers, topic)) == ["a", "b", "c"]


def test_an_open_transaction_of_a_lost_process_ends_with_the_next_commit(
    kafka_server: KafkaServer, tmp_path: Path
) -> None:
    """Until then it holds up readers, and no longer."""
    found = target(kafka_server, "open")
    with closing(CommittingProcess(found, tmp_path, 1, ["a"], "commit_transaction", signal.SIGKILL)) as killed:
        killed.wait_until_stopped()
        kafka_server.add("open", 0, b"of another producer")
        assert read(found.servers, "open", wait=False) == []
        commit(found, context_of(tmp_path, attempt=1), 1, killed.committables)
    assert values_of(read(found.servers, "open")) == ["a", "of another producer"]


def test_brokers_abort_a_transaction_whose_process_has_stopped(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """Readers get past it without another process. The records are committed when the process continues."""
    found = target(kafka_server, "stopped")
    with closing(CommittingProcess(found, tmp_path, 1, ["a"], "commit_transaction", signal.SIGSTOP)) as stopped:
        stopped.wait_until_stopped()
        kafka_server.add("stopped", 0, b"of another producer")
        assert read(found.servers, "stopped", wait=False) == []
        until("the abort", lambda: bool(read(found.servers, "stopped", wait=False)))
        assert values_of(read(found.servers, "stopped")) == ["of another producer"]
        outcome = stopped.resume().splitlines()
        assert outcome[0].startswith("failed: could not commit checkpoint 1"), outcome
        assert outcome[1] == "committed"
    assert values_of(read(found.servers, "stopped")) == ["a", "of another producer"]


def test_each_failed_commit_doubles_the_time_limit_of_transactions(
    kafka_server: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the longer one of a minute and the time limit of a delivery. A commit that succeeds keeps its limit."""
    found = target(kafka_server, "doubled", delivery_timeout_ms=70_000)
    made: list[tuple[object, object]] = []
    make = transactions.make_producer
    failures = 4

    def recorded(settings: Mapping[str, object], *args: object) -> RecordProducer:
        made.append((settings["transaction.timeout.ms"], settings["delivery.timeout.ms"]))
        return make(settings, *args)  # type: ignore[arg-type]

    def send(*args: object) -> None:
        if len(made) <= failures:
            raise KafkaWriteError("the brokers are slow")
        kafka_producer.send(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(transactions, "make_producer", recorded)
    monkeypatch.setattr(transactions, "send", send)
    context = context_of(tmp_path)
    first, second = prepared(found, context, 1, "a"), prepared(found, context, 2, "b")
    with closing(KafkaSink(found).open_committer(context)) as committer:
        for _ in range(failures):
            with pytest.raises(KafkaWriteError, match="slow"):
                committer.commit(CommitToken(context.job_id, 1), first)
        committer.commit(CommitToken(context.job_id, 1), first)
        committer.commit(CommitToken(context.job_id, 2), second)
    assert made == [(10_000, 10_000), (20_000, 20_000), (40_000, 40_000), (70_000, 70_000), (70_000, 70_000)]
    assert values_of(read(found.servers, "doubled")) == ["a", "b"]


def test_tokens_are_read_to_the_end_or_not_at_all(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """A transaction of another process in the partition of the tokens is waited for, and then an error."""
    found = target(kafka_server, "held-up")
    assert found.tokens is not None
    lane = lane_of(tmp_path)
    commit(found, context_of(tmp_path), 1, prepared(found, context_of(tmp_path), 1, "a"))
    other = Producer({"bootstrap.servers": found.servers, "transactional.id": "another", "log_level": 0})
    other.init_transactions(LIMIT_S)
    other.begin_transaction()
    other.produce(found.tokens.name, b"x", b"another", found.tokens.partition_of(lane))
    assert other.flush(LIMIT_S) == 0
    with pytest.raises(KafkaWriteError, match=r"could not read the commit tokens in partition \d+ .* to their end"):
        read_token(found.servers, {}, found.tokens, lane, limit_ms=1_000)
    other.abort_transaction(LIMIT_S)
    assert token_of(found, lane) == Token(1, 1)


def _stable_end(settings: Mapping[str, object], topic: str, partition: int) -> int:
    """Breaks: the end of the tokens is the end of their partition. Here it is where readers are held up."""
    with closing(transactions._reader(settings, "read_committed")) as asked:
        return asked.get_watermark_offsets(TopicPartition(topic, partition), timeout=LIMIT_S)[1]


def test_tokens_that_are_not_read_to_the_end_would_double_records(
    kafka_server: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest token is behind an open transaction of another process. A commit fails rather than not to see it."""
    found = target(kafka_server, "not-to-the-end")
    assert found.tokens is not None
    context = context_of(tmp_path)
    first, second = prepared(found, context, 1, "a"), prepared(found, context, 2, "b")
    other = Producer({"bootstrap.servers": found.servers, "transactional.id": "one in between", "log_level": 0})
    other.init_transactions(LIMIT_S)
    with closing(KafkaSink(found).open_committer(context)) as committer:
        committer.commit(CommitToken(context.job_id, 1), first)
        assert token_of(found, lane_of(tmp_path)) == Token(1, 1)
        other.begin_transaction()
        other.produce(found.tokens.name, b"x", b"another", found.tokens.partition_of(lane_of(tmp_path)))
        assert other.flush(LIMIT_S) == 0
        committer.commit(CommitToken(context.job_id, 2), second)
    monkeypatch.setattr(transactions, "read_token", partial(read_token, limit_ms=1_000))
    with pytest.raises(KafkaWriteError, match="to their end"):
        commit(found, context, 2, second)
    assert values_of(read(found.servers, "not-to-the-end")) == ["a", "b"]
    monkeypatch.setattr(transactions, "_end_offset", _stable_end)
    commit(found, context, 2, second)
    assert values_of(read(found.servers, "not-to-the-end")) == ["a", "b", "b"]
    other.abort_transaction(LIMIT_S)


@pytest.mark.parametrize("fenced", [True, False])
def test_a_committer_that_is_not_fenced_would_double_records(
    kafka_server: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fenced: bool
) -> None:
    """It has read its token before its successor committed. The transactional id of their lane stops it."""
    settings_of = KafkaTarget.producer_settings

    def of_each_process(
        self: KafkaTarget, transactional_id: str | None = None, *args: int, **settings: int
    ) -> dict[str, object]:
        """Breaks: all committers of a lane have one transactional id."""
        return settings_of(self, transactional_id and f"{transactional_id}/{uuid.uuid4()}", *args, **settings)

    if not fenced:
        monkeypatch.setattr(KafkaTarget, "producer_settings", of_each_process)
    topic = f"fenced-{fenced}"
    found = target(kafka_server, topic)
    context = context_of(tmp_path)
    first, second = prepared(found, context, 1, "a"), prepared(found, context, 2, "b")
    with closing(KafkaSink(found).open_committer(context)) as zombie:
        zombie.commit(CommitToken(context.job_id, 1), first)
        commit(found, context_of(tmp_path, attempt=1), 2, second)
        with pytest.raises(KafkaWriteError, match="could not commit checkpoint 2") if fenced else nullcontext():
            zombie.commit(CommitToken(context.job_id, 2), second)
    assert values_of(read(found.servers, topic)) == (["a", "b"] if fenced else ["a", "b", "b"])


@pytest.mark.parametrize("parallelism", [1, 2, 8])
def test_a_restored_job_commits_with_another_parallelism(
    kafka_server: KafkaServer, tmp_path: Path, parallelism: int
) -> None:
    """Whoever owns a bucket now commits what is in it, once; some was committed before the job was lost."""
    topic = f"rescaled-{parallelism}"
    found = target(kafka_server, topic, 3)
    contexts = [context_of(tmp_path, subtask=subtask, parallelism=4) for subtask in range(4)]
    committables = [prepared(found, context, 5, f"{context.subtask}") for context in contexts]
    commit(found, contexts[1], 5, committables[1])
    commit(found, contexts[3], 5, committables[3])
    for subtask in range(parallelism):
        context = context_of(tmp_path, job="job-2", subtask=subtask, parallelism=parallelism)
        mine = [each for some in committables for each in some if each.bucket in context.buckets]
        with closing(KafkaSink(found).open_committer(context)) as committer:
            for _ in range(2):
                committer.commit(CommitToken(contexts[0].job_id, 5), mine)
            # The new job counts its checkpoints by itself.
            committer.commit(CommitToken(context.job_id, 1), prepared(found, context, 1, f"new-{subtask}"))
    new = [f"new-{subtask}" for subtask in range(parallelism)]
    assert values_of(read(found.servers, topic)) == sorted(["0", "1", "2", "3", *new])


@pytest.mark.parametrize("records_max", [1_000, 3])
def test_checkpoints_that_are_due_are_committed_together(
    kafka_server: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records_max: int
) -> None:
    """In one transaction, or in several of limited size. The newest token covers every earlier checkpoint."""
    monkeypatch.setattr(transactions, "PART_RECORDS_MAX", records_max)
    topic = f"together-{records_max}"
    found = target(kafka_server, topic)
    context = context_of(tmp_path)
    writer = KafkaSink(found).open_writer(context)
    due = []
    for checkpoint in (1, 2, 4):
        writer.write(records_of([f"{checkpoint}-{number}" for number in range(2)]))
        due.append((CommitToken(context.job_id, checkpoint), writer.prepare(checkpoint)))
    reader = Consumer({"bootstrap.servers": found.servers, "group.id": topic, "isolation.level": "read_committed"})
    with closing(KafkaSink(found).open_committer(context)) as committer, closing(reader):
        committer.commit_all(due)
        # A transaction has a mark at its end.
        marks = 1 if records_max == 1_000 else 3
        until("the committed records", lambda: stable_end(reader, topic) == 6 + marks)
        committer.commit_all(due)
    assert token_of(found, lane_of(tmp_path)) == Token(4, 1)
    for token, committables in due:
        commit(found, context, token.checkpoint_id, committables)
    values = [value.decode() for _, value in read(found.servers, topic) if value is not None]
    assert values == ["1-0", "1-1", "2-0", "2-1", "4-0", "4-1"]


def test_parts_are_grouped_within_both_limits() -> None:
    """In their order. A part that is larger than a limit is alone."""

    def part(number: int, records: int, size_bytes: int) -> transactions.Part:
        return transactions.Part(Token(1, number), lambda: (), None, records, size_bytes)

    sizes = [(1, 1), (2, 1), (1, 1), (1, 8), (1, 2), (1, 99), (9, 1), (1, 1)]
    parts = [part(number, *size) for number, size in enumerate(sizes)]
    groups = list(transactions.transactions_of(parts, 3, 10))
    assert [[each.done.parts for each in group] for group in groups] == [[0, 1], [2, 3], [4], [5], [6], [7]]
    assert list(transactions.transactions_of([], 3, 10)) == []


def test_many_records_are_committed_in_parts(
    kafka_server: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is a transaction, and a commit that fails between two of them continues with the next part."""
    monkeypatch.setattr(kafka_sink, "CHUNK_RECORDS", 10)
    for module in (kafka_sink, transactions):
        monkeypatch.setattr(module, "PART_RECORDS_MAX", 20)
    found = target(kafka_server, "parts", 2)
    context = context_of(tmp_path)
    values = [f"{number:03}" for number in range(95)]
    committables = prepared(found, context, 1, *values)
    (path,) = committables[0].files[2:3]
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[:-9] + b"?" + data[-8:])
    with pytest.raises(CorruptionError, match=r"staged rows .* have changed"):
        commit(found, context, 1, committables)
    assert values_of(read(found.servers, "parts")) == values[:40]
    assert token_of(found, lane_of(tmp_path)) == Token(1, 2)
    Path(path).write_bytes(data)
    commit(found, context, 1, committables)
    assert values_of(read(found.servers, "parts")) == values


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_a_record_that_the_topic_refuses_fails_the_commit_as_a_whole(
    kafka_server: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """The limit was lowered after the submission. The error names topic and setting.

    The brokers may refuse the record before the commit begins. Then the client accepts no more records.
    """
    send = kafka_producer.send

    def until_refused(producer: RecordProducer, records: pa.RecordBatch, topic: str | None, doing: str) -> None:
        def refused() -> bool:
            try:
                send(producer, records, topic, doing)
            except KafkaWriteError:
                return True
            return False

        if topic == token_topic:
            until("the transaction has failed", refused)
        else:
            send(producer, records, topic, doing)

    topic = f"small-{early}"
    kafka_server.create(topic, 1, **{"max.message.bytes": "1000"})
    found = KafkaTarget(kafka_server.servers, topic)
    found.check()
    found = replace(found, record_bytes_max=None)
    context = context_of(tmp_path)
    committables = prepared(found, context, 1, "fits", "x" * 5_000)
    token_topic = found.token_topic
    if early:
        monkeypatch.setattr(transactions, "send", until_refused)
    with pytest.raises(KafkaWriteError, match=rf"records were not delivered.*topic '{topic}'.*max\.message\.bytes"):
        commit(found, context, 1, committables)
    assert read(found.servers, topic) == []
    assert token_of(found, lane_of(tmp_path)) is None


def test_another_token_topic_of_the_same_name_is_refused(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """A recreated token topic has lost its tokens, so the commit cannot be judged."""
    found = target(kafka_server, "judged", token_topic="judged-tokens")
    context = context_of(tmp_path)
    committables = prepared(found, context, 1, "a")
    commit(found, context, 1, committables)
    kafka_server.delete("judged-tokens")
    with pytest.raises(KafkaWriteError, match="does not exist any more"):
        commit(found, context, 1, committables)
    KafkaTarget(found.servers, "judged", token_topic="judged-tokens").check()
    with pytest.raises(KafkaWriteError, match="is another topic of this name"):
        commit(found, context, 1, committables)
    assert found.tokens is not None
    kafka_server.create("judged-grown", 1, **{"cleanup.policy": "compact"})
    grown = replace(found, token_topic="judged-grown")
    grown.check()
    committables = prepared(grown, context, 2, "b")
    kafka_server.grow("judged-grown", 3)
    with pytest.raises(KafkaWriteError, match="has 3 partitions, and had 1"):
        commit(grown, context, 2, committables)
    assert values_of(read(found.servers, "judged")) == ["a"]


def test_a_foreign_record_in_the_place_of_a_token_is_refused(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """It is not taken for "nothing was committed"."""
    found = target(kafka_server, "foreign", token_topic="foreign-tokens")
    assert found.tokens is not None
    producer = Producer({"bootstrap.servers": found.servers, "log_level": 0})
    producer.produce("foreign-tokens", b"{}", lane_of(tmp_path).encode(), found.tokens.partition_of(lane_of(tmp_path)))
    assert producer.flush(LIMIT_S) == 0
    with pytest.raises(KafkaWriteError, match="Another program writes to the token topic"):
        commit(found, context_of(tmp_path), 1, prepared(found, context_of(tmp_path), 1, "a"))
    assert read(found.servers, "foreign") == []


def test_topics_are_checked_at_submission(kafka_server: KafkaServer) -> None:
    """Nothing is created if one of them is refused."""
    missing = KafkaTarget(kafka_server.servers, "missing", token_topic="never-made")
    with pytest.raises(ConfigurationError, match=r"topic 'missing' does not exist at .*create=True"):
        missing.check()
    kafka_server.create("not-compacted", 1)
    kafka_server.create("half-compacted", 1, **{"cleanup.policy": "compact,delete"})
    for topic in ("not-compacted", "half-compacted"):
        found = KafkaTarget(kafka_server.servers, "missing", create=True, token_topic=topic)
        with pytest.raises(ConfigurationError, match=rf"token topic '{topic}' has cleanup\.policy=.*compact"):
            found.check()
    producer = Producer({"bootstrap.servers": kafka_server.servers, "log_level": 0})
    assert {"missing", "never-made"}.isdisjoint(producer.list_topics(timeout=LIMIT_S).topics)


def test_topics_are_created_on_request(kafka_server: KafkaServer) -> None:
    """Creates a topic with this number of partitions; the token topic is compacted."""
    found = KafkaTarget(kafka_server.servers, "wished", create=3, token_topic="wished-tokens")
    found.check()
    assert isinstance(found.tokens, TokenTopic)
    assert found.tokens.name == "wished-tokens"
    assert found.record_bytes_max == 1_048_588
    producer = Producer({"bootstrap.servers": kafka_server.servers, "log_level": 0})
    assert len(producer.list_topics("wished", timeout=LIMIT_S).topics["wished"].partitions) == 3
    found.check()


def test_brokers_that_are_not_there_are_named(tmp_path: Path) -> None:
    """And settings that the client refuses."""
    with pytest.raises(ConfigurationError, match="the client refuses its settings"):
        KafkaTarget("127.0.0.1:1", "t", properties={"no.such.setting": 1}).check()


def test_records_keep_their_order_in_a_partition(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """Over many checkpoints, and readers of committed records are at the end after each."""
    found = target(kafka_server, "ordered")
    context = context_of(tmp_path)
    reader = Consumer({"bootstrap.servers": found.servers, "group.id": "order", "isolation.level": "read_committed"})
    values: list[str] = []
    with closing(KafkaSink(found).open_committer(context)) as committer, closing(reader):
        writer = KafkaSink(found).open_writer(context)
        for checkpoint in range(1, 6):
            some = [f"{checkpoint}-{number}" for number in range(100)]
            writer.write(records_of(some))
            committer.commit(CommitToken(context.job_id, checkpoint), writer.prepare(checkpoint))
            values += some
            until("the committed records", lambda: stable_end(reader, "ordered") == len(values) + checkpoint)  # noqa: B023
    assert [value.decode() for _, value in read(found.servers, "ordered") if value is not None] == values


def test_topics_and_partitions_of_rows_must_exist(kafka_server: KafkaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a commit could never succeed. What is missing is looked for again, and then found."""
    kafka_server.create("there", 2)
    kafka_server.create("there-small", 1, **{"max.message.bytes": "1000"})
    found = KafkaTarget(kafka_server.servers, None)
    found.check()
    known = found.known_topics()
    named = pa.array(["there", "not-there", None, "there", "there"])
    partitions = pa.array([1, 0, 0, 2, None], pa.int32())
    missing = "topic 'not-there', which a row names, does not exist"
    few = "partition 2 does not exist: topic 'there' has 2 partitions"
    assert known.bad_rows(named, partitions, 5) == {1: missing + ". Create it", 3: few}
    assert known.bad_rows(named, None, 5) == {1: missing + ". Create it"}
    with pytest.raises(KafkaWriteError, match=r"topic 'there-small', which a row names, .*max\.message\.bytes=1000"):
        known.bad_rows(pa.array(["there-small"]), None, 1)
    kafka_server.create("not-there")
    kafka_server.grow("there", 3)
    assert set(known.bad_rows(named, partitions, 5)) == {1, 3}, "brokers are not asked for each batch"
    monkeypatch.setattr(topics, "_MISSING_MS", 0)
    assert known.bad_rows(named, partitions, 5) == {}
    one = replace(found, topic="there").known_topics()
    assert one.bad_rows(None, pa.array([2, 3], pa.int32()), 2) == {
        1: "partition 3 does not exist: topic 'there' has 3 partitions"
    }


def test_records_must_fit_the_rules_of_their_topic(kafka_server: KafkaServer) -> None:
    """Brokers would refuse them for ever, or delete them within minutes."""
    kafka_server.create("day", 1, **{"retention.ms": "86400000", "message.timestamp.after.max.ms": "1000"})
    kafka_server.create("compacted", 1, **{"cleanup.policy": "compact", "message.timestamp.before.max.ms": "5000"})
    kafka_server.create("stamped", 1, **{"message.timestamp.type": "LogAppendTime"})
    now = 200_000_000_000
    known = topics.KnownTopics({"bootstrap.servers": kafka_server.servers}, None, 1000, clock_ms=lambda: now)
    named = pa.array(["day", "day", "day", "compacted", "compacted", "stamped", "stamped", None])
    keys = pa.array([None, b"", b"a", b"a", None, b"a", None, None])
    times = pa.array([now - 86_400_000, now - 86_400_001, now + 1001, now - 5001, now, now, None, 0])
    bad = known.refused_rows(named, keys, times, 8)
    assert set(bad) == {1, 2, 3, 4, 5}
    assert "86400001 ms old, and topic 'day' has retention.ms=86400000, so that brokers would delete it" in bad[1]
    assert "1001 ms ahead, and topic 'day' has message.timestamp.after.max.ms=1000" in bad[2]
    assert "5001 ms old, and topic 'compacted' has message.timestamp.before.max.ms=5000" in bad[3]
    assert "compacted, and the record has no key" in bad[4]
    assert "message.timestamp.type=LogAppendTime" in bad[5]
    assert set(known.refused_rows(named, None, None, 8)) == {3, 4}
    with pytest.raises(ConfigurationError, match=r"topic 'compacted' is compacted, .*Give key="):
        KafkaTarget(kafka_server.servers, "compacted", keyed=False).check()
    with pytest.raises(ConfigurationError, match=r"timestamp=\): topic 'stamped' has message\.timestamp\.type"):
        KafkaTarget(kafka_server.servers, "stamped", timed=True).check()


@pytest.mark.parametrize("properties", [{}, {"stats_cb": print}], ids=["batches", "records"])
def test_the_sink_keeps_the_contract_of_committing_sinks(
    kafka_server: KafkaServer, properties: dict[str, object]
) -> None:
    """Kills, repeated commits, an aborted checkpoint, another parallelism, zombies, another job.

    With a callback in the settings, records go one by one through the client of Python.
    """
    topic = f"contract-{len(properties)}"
    # The contract has jobs of the same name each time, so they need tokens of their own.
    found = target(kafka_server, topic, 2, properties=properties, token_topic=f"{topic}-tokens")

    def visible() -> list[dict[str, object]]:
        return [{"key": key, "value": value} for key, value in read(found.servers, topic)]

    batches = [
        pa.RecordBatch.from_pylist([{"key": key, "value": value} for key, value in pairs])
        for pairs in ([(b"a", b"1"), (b"b", b"2")], [(b"a", b"3")])
    ]
    check_committing_sink(KafkaSink(found), batches, visible)
