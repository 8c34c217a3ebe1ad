"""A broker of Kafka for tests: the mock that librdkafka has, in this process, on ports of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import Producer
from waiting import LIMIT_S

PARTITIONS = 4
"""Of each topic; the mock makes a topic when somebody writes to it."""


class Broker:
    """Writes records, and knows the address."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        (broker,) = producer.list_topics(timeout=240).brokers.values()
        self.servers = f"{broker.host}:{broker.port}"

    def add(
        self, topic: str, partition: int, *values: bytes | None, at_ms: int = 1_000, key: bytes | None = None
    ) -> None:
        """Records, with a key that is the number of the partition, or `key`; they are there when this returns."""
        for number, value in enumerate(values):
            place = {"partition": partition, "timestamp": at_ms + number}
            self._producer.produce(topic, value=value, key=key or str(partition).encode(), **place)
        assert self._producer.flush(LIMIT_S) == 0


@contextmanager
def broker() -> Iterator[Broker]:
    """A broker that lives as long as the context."""
    yield Broker(Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "mock", "log_level": 3}))
