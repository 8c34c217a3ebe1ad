"""Apache Kafka for tests: one broker from Maven's jars, on loopback, stopped when the block ends.

The jars are fetched once into a cache folder outside the repository. Where Java, Maven or its registry are missing,
`run_kafka` raises `KafkaUnavailable`, whose text is the one line that a skipped test shows.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL
from functools import partial
from pathlib import Path

from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic
from waiting import LIMIT_S, until

VERSION = "4.1.2"
_FETCH_S_MAX = 300
_FORMAT_S_MAX = 120
_START_TRIES_MAX = 3
_REQUEST_S = 10.0
"""Timeout in seconds of a request to a starting broker. It is repeated while the process of the broker lives."""
_LIBC = CDLL(None)
_PR_SET_PDEATHSIG = 1
_JARS = (
    f"org.apache.kafka:kafka_2.13:{VERSION}",
    f"org.apache.kafka:kafka-tools:{VERSION}",
    "org.slf4j:slf4j-simple:1.7.36",
)


class KafkaUnavailable(Exception):
    """Apache Kafka cannot be started on this machine; the text names what is missing."""


class KafkaServer:
    """A running broker: makes, changes and deletes topics, and writes records."""

    def __init__(
        self, servers: str, process: subprocess.Popen[bytes], start: Callable[[], subprocess.Popen[bytes]]
    ) -> None:
        """`start`: starts another process on the same folder."""
        self.servers = servers
        self.process = process
        self._start = start
        self._admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})

    def create(self, topic: str, partitions: int = 1, **settings: str) -> None:
        """Create a topic, which has a leader for each partition when this returns."""
        made = NewTopic(topic, num_partitions=partitions, replication_factor=1, config=settings)
        self._admin.create_topics([made])[topic].result(LIMIT_S)
        until(f"the leaders of {topic}", lambda: self._leaders(topic) == partitions)

    def delete(self, topic: str) -> None:
        """Delete a topic, which is gone when this returns."""
        self._admin.delete_topics([topic], operation_timeout=LIMIT_S)[topic].result(LIMIT_S)
        until(f"{topic} to be gone", lambda: self._leaders(topic) == 0)

    def grow(self, topic: str, partitions: int) -> None:
        """Give a topic more partitions."""
        self._admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(LIMIT_S)
        until(f"the leaders of {topic}", lambda: self._leaders(topic) == partitions)

    def add(self, topic: str, partition: int, *values: bytes | None) -> None:
        """Write records, which are in the partition when this returns."""
        # A producer remembers a topic as it was, so each of these calls has its own.
        producer = Producer({"bootstrap.servers": self.servers, "log_level": 0})
        for value in values:
            producer.produce(topic, value=value, partition=partition)
            producer.poll(0)
        assert producer.flush(LIMIT_S) == 0

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Delete the records of a partition before an offset."""
        place = TopicPartition(topic, partition, before)
        for future in self._admin.delete_records([place]).values():
            future.result(LIMIT_S)

    def pause(self) -> None:
        """Stop the broker's process, as a machine does that hangs."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """After `pause`."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the broker's process, which is gone when this returns."""
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        """After `kill`. The broker answers when this returns."""
        self.process = self._start()
        assert _answers(self.servers, self.process), "the broker does not start again"

    def _leaders(self, topic: str) -> int:
        found = self._admin.list_topics(timeout=LIMIT_S).topics.get(topic)
        if found is None or found.error is not None:
            return 0
        return sum(each.leader >= 0 and each.error is None for each in found.partitions.values())


@contextmanager
def run_kafka(folder: Path, *options: str) -> Iterator[KafkaServer]:
    """Start a broker on `folder`, with options for Java. Raises KafkaUnavailable."""
    java = _found("java")
    classpath = f"{maven_jars(f'kafka-{VERSION}', *_JARS)}/*"
    for attempt in range(_START_TRIES_MAX):
        # Another process may take a port between the choice and the start.
        settings = folder / f"server-{attempt}.properties"
        ports = free_ports(2)
        data = folder / f"data-{attempt}"
        settings.write_text(_settings(data, *ports))
        storage = [java, "-Xmx128m", "-XX:TieredStopAtLevel=1", "-cp", classpath, "kafka.tools.StorageTool"]
        _run([*storage, "format", "-t", "dGlkZWdhdGUtdGVzdHMtMQ", "-c", str(settings)], _FORMAT_S_MAX)
        heap = ["-Xms192m", "-Xmx192m", "-XX:+UseSerialGC"]
        start = partial(_start, [java, *heap, *options, "-cp", classpath], settings)
        server = KafkaServer(f"127.0.0.1:{ports[0]}", start(), start)
        try:
            if _answers(server.servers, server.process):
                yield server
                return
        finally:
            server.kill()
    raise KafkaUnavailable(f"Apache Kafka does not start; see {folder}/kafka.log")


def _start(command: list[str], settings: Path) -> subprocess.Popen[bytes]:
    with (settings.parent / "kafka.log").open("ab") as log:
        return subprocess.Popen(
            [*command, "kafka.Kafka", str(settings)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=settings.parent,
            preexec_fn=_die_with_parent,
        )


def _die_with_parent() -> None:
    """A broker ends with the test run, also where the run is killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _answers(servers: str, process: subprocess.Popen[bytes]) -> bool:
    """Whether the broker answers before its process ends."""
    # By default a client that was refused waits for up to ten seconds before it connects again.
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0, "reconnect.backoff.max.ms": 100})

    def over() -> bool:
        if process.poll() is not None:
            return True
        try:
            return bool(admin.list_topics(timeout=_REQUEST_S).brokers)
        except KafkaException:
            return False

    until("Apache Kafka", over)
    return process.poll() is None


def maven_jars(name: str, *artifacts: str) -> Path:
    """Return a folder with the jars of artifacts, "group:artifact:version", and of what they need.

    They are fetched once. Raises KafkaUnavailable.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidegate-tests"
    target = cache / name
    if target.is_dir():
        return target
    maven = _found("mvn")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        (Path(folder) / "pom.xml").write_text(_pom(artifacts))
        lib = Path(folder) / "lib"
        _run(
            [maven, "-q", "-B", "-f", folder, "dependency:copy-dependencies", f"-DoutputDirectory={lib}"], _FETCH_S_MAX
        )
        try:
            lib.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    return target


def _pom(artifacts: tuple[str, ...]) -> str:
    needs = ""
    for artifact in artifacts:
        group, name, version = artifact.split(":")
        needs += f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId>"
        needs += f"<version>{version}</version></dependency>"
    return (
        "<project><modelVersion>4.0.0</modelVersion><groupId>tidegate.tests</groupId><artifactId>jars</artifactId>"
        f"<version>1</version><dependencies>{needs}</dependencies></project>"
    )


def _run(command: list[str], limit_s: float) -> None:
    """Run a command to its end. Raises KafkaUnavailable if it fails or takes too long."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise KafkaUnavailable(f"{Path(command[0]).name} took more than {limit_s:.0f} s") from error
    if done.returncode:
        lines = (done.stdout + done.stderr).decode(errors="replace").strip().splitlines() or ["no output"]
        raise KafkaUnavailable(f"{Path(command[0]).name} fails: {lines[0][:200]}")


def _found(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise KafkaUnavailable(f"no {program} on the PATH")
    return found


def free_ports(count: int) -> list[int]:
    """Ports of loopback that are free now."""
    opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in opened]
    for each in opened:
        each.close()
    return ports


def _settings(data: Path, port: int, controller: int) -> str:
    return f"""process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
log.dirs={data}
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.num.partitions=4
transaction.state.log.min.isr=1
transaction.abort.timed.out.transaction.cleanup.interval.ms=1000
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
auto.create.topics.enable=false
log.cleaner.dedupe.buffer.size=16777216
log.retention.check.interval.ms=1000
log.segment.delete.delay.ms=1000
num.network.threads=2
num.io.threads=2
"""
