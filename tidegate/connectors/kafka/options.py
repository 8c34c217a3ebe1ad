"""Options of the Kafka source: topics, start and end positions, missing records, and settings of the client.

Options are checked when the stream is created. Named topics and partitions are checked when the job is submitted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.extras import load

OnMissing: TypeAlias = Literal["fail", "earliest", "latest"]
"""Policy for a partition whose next record no longer exists."""
Start: TypeAlias = "str | int | datetime | Mapping[str, str | int | datetime | Mapping[int, str | int | datetime]]"
"""One of STARTS, or a time (milliseconds since 1970), for all partitions.

A mapping has a position for each topic, or for each partition of a topic. For a partition, an integer is an offset.
"""
End: TypeAlias = "str | int | datetime | Mapping[str, str | int | datetime | Mapping[int, str | int | datetime]]"
"""The end position, in the form of `Start`. The only allowed word is "latest"."""

STARTS = ("earliest", "latest", "group", "group_or_earliest", "group_or_latest")
ENDS = ("latest",)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_INLINE_FLAGS = re.compile(r"^(?:\(\?#[^)]*\)|\(\?[aimsxu]+\))+")
"""Matches flags at the begin of a pattern, which Python allows nowhere else, and comments between them."""
_VERBOSE_FLAGS = re.compile(r"^(?:\s|#.*(?:\n|$)|\(\?#[^)]*\)|\(\?[aimsxu]+\))+")
"""Matches the flags of a verbose pattern, in which blanks and comments to the end of a line do not count."""
_OURS = {"enable.auto.commit": False, "enable.auto.offset.store": False, "auto.offset.reset": "error"}
"""Settings of the client on which correctness depends. Users cannot change them."""
_DEFAULTS = {
    "group.id": "tidegate",
    # The client waits this long when it has enough of a partition; its own default is a second.
    "fetch.queue.backoff.ms": 10,
    # Bounds of the client's buffer for all partitions, and of one answer of a broker.
    "queued.max.messages.kbytes": 16 * 1024,
    "fetch.max.bytes": 16 * 1024 * 1024,
}
"""Settings of the client that `properties=` may change."""


_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")


def is_topic_name(name: object) -> bool:
    """Returns whether a value is a valid name of a Kafka topic."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None and name not in (".", "..")


def kafka() -> Any:
    """Imports and returns `confluent_kafka`. Raises ConfigurationError if it is not installed."""
    return load("from_kafka", "kafka", "confluent_kafka")


def client_settings(servers: str, properties: Mapping[str, object]) -> dict[str, object]:
    """Returns the settings of a consumer. Raises ConfigurationError for properties that only the source may set."""
    taken = sorted({*_OURS, "bootstrap.servers", "enable.partition.eof"} & set(properties))
    if taken:
        raise ConfigurationError(f"from_kafka(properties=): {taken[0]!r} is set by the source; remove it")
    settings: dict[str, object] = {**_DEFAULTS, **properties}
    return settings | _OURS | {"bootstrap.servers": servers, "enable.partition.eof": True}


def admin_settings(settings: Mapping[str, object]) -> dict[str, Any]:
    """Returns the settings of an admin client, derived from the settings of a consumer."""
    ours = {*_OURS, *_DEFAULTS, "enable.partition.eof"}
    return {name: value for name, value in settings.items() if name not in ours}


def with_group(properties: Mapping[str, object], group: str | None, start: object, commits: bool) -> dict[str, object]:
    """Returns the properties with the consumer group. Raises ConfigurationError if it is missing or given twice."""
    given = properties.get("group.id", group)
    if group is not None and (not isinstance(group, str) or not group or given != group):
        wrong = "give the name of a consumer group" if given == group else "properties= has another group.id; remove it"
        raise ConfigurationError(f"from_kafka(group={group!r}): {wrong}")
    if given is None and (commits or any(place.startswith("group") for place in _words(start))):
        needs = "commit_offsets=True" if commits else "start='group'"
        raise ConfigurationError(f"from_kafka({needs}) needs a consumer group; add group='its name'")
    return dict(properties) if given is None else {**properties, "group.id": given}


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics to read: a list of names, or all topics whose full name matches a regular expression."""

    names: tuple[str, ...] = ()
    pattern: str | None = None

    @classmethod
    def of(cls, given: object) -> Topics:
        """Parses a user's `topics` argument. Raises ConfigurationError."""
        if isinstance(given, re.Pattern):
            if not isinstance(given.pattern, str):
                raise ConfigurationError(
                    f"from_kafka(topics=): the pattern {given.pattern!r} is of bytes; compile it from a string"
                )
            # The flags become part of the pattern, so that it can be stored. They include flags that begin it.
            begin = _VERBOSE_FLAGS if given.flags & re.VERBOSE else _INLINE_FLAGS
            text = begin.sub("", given.pattern)
            flags = "".join(letter for letter in "aimsx" if given.flags & getattr(re, letter.upper()))
            # A comment of a verbose pattern ends with its line.
            return cls(pattern=f"(?{flags}:{text}\n)" if "x" in flags else f"(?{flags}:{text})" if flags else text)
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            raise ConfigurationError(
                f"from_kafka(topics={given!r}): give a list of names, or re.compile(...) for all topics that match"
            )
        names = tuple(given)
        if wrong := [name for name in names if not is_topic_name(name)]:
            raise ConfigurationError(
                f"from_kafka(topics=): {wrong[0]!r} is not the name of a topic; a name has 1 to 249 letters, digits, "
                "dots, underscores and hyphens. For all topics that match a pattern give re.compile(...)"
            )
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigurationError(f"from_kafka(topics=): {twice[0]!r} is there twice; name it once")
        return cls(names)

    def matches(self, name: str) -> bool:
        """Returns whether a topic is among these topics.

        A pattern never matches Kafka's internal topics, which begin with __.
        """
        if self.pattern is None:
            return name in self.names
        return not name.startswith("__") and re.fullmatch(self.pattern, name) is not None

    def __str__(self) -> str:
        return ", ".join(map(repr, self.names)) if self.pattern is None else f"pattern {self.pattern!r}"


@dataclass(frozen=True, slots=True)
class AtOffset:
    """A position in a partition: the record with this offset."""

    offset: int


@dataclass(frozen=True, slots=True)
class AtTime:
    """A position in a partition: the first record with this timestamp (ms since 1970) or a later one."""

    at_ms: int


Place: TypeAlias = "str | AtOffset | AtTime"


def place_of(given: object, topic: str, partition: int, setting: str) -> Place:
    """Returns the position at which one partition starts or ends, from a checked `Start` or `End`. `setting` names the
    argument in errors.

    Raises ConfigurationError if the topic or partition is missing in a mapping.
    """
    if not isinstance(given, Mapping):
        return _place(given, offsets=False)
    if topic not in given:
        raise ConfigurationError(
            f"from_kafka({setting}=): topic {topic!r} is read, and {setting}= has no place for it; add it, as in "
            f"{{{topic!r}: 'earliest'}}"
        )
    of_topic = given[topic]
    if not isinstance(of_topic, Mapping):
        return _place(of_topic, offsets=False)
    if partition not in of_topic:
        raise ConfigurationError(
            f"from_kafka({setting}=): partition {partition} of topic {topic!r} has no offset in {setting}=, which has "
            f"{list(of_topic)}; add it, as in {{{partition}: 0}}"
        )
    return _place(of_topic[partition], offsets=True)


def check_place(given: object, words: Sequence[str], setting: str) -> None:
    """Raises ConfigurationError unless a user's `start` or `end` is valid. `words` are the allowed words."""
    if not isinstance(given, Mapping):
        _check_one(given, words, setting, "a time", "")
        return
    for topic, of_topic in given.items():
        if not isinstance(topic, str):
            raise ConfigurationError(
                f"from_kafka({setting}=): {topic!r} is not the name of a topic; give a name that topics= has"
            )
        if not isinstance(of_topic, Mapping):
            if isinstance(of_topic, int):
                raise ConfigurationError(
                    f"from_kafka({setting}=): {of_topic!r} for topic {topic!r} may be an offset or a time; give "
                    "offsets as {partition: offset}, and a time as a datetime"
                )
            _check_one(of_topic, words, setting, "a datetime", f" for topic {topic!r}")
            continue
        for partition, place in of_topic.items():
            where = f" for partition {partition!r} of {topic!r}"
            if isinstance(partition, bool) or not isinstance(partition, int) or partition < 0:
                raise ConfigurationError(
                    f"from_kafka({setting}=): {partition!r} is not a partition of {topic!r}"
                    "; give the number of one, from 0"
                )
            if isinstance(place, int) and place < 0:
                raise ConfigurationError(
                    f"from_kafka({setting}=): {place!r}{where} is not an offset; give a whole number from 0"
                )
            _check_one(place, words, setting, "an offset, a datetime", where)


def check_named(given: object, partitions: Mapping[str, int], setting: str) -> None:
    """Raises ConfigurationError if a `Start` or `End` names a topic or a partition that does not exist.

    `partitions`: number of partitions of each topic that is read.
    """
    for topic, of_topic in given.items() if isinstance(given, Mapping) else ():
        if topic not in partitions:
            raise ConfigurationError(f"from_kafka({setting}=): topic {topic!r} is not in topics=; remove it")
        unknown = (
            [number for number in of_topic if number >= partitions[topic]] if isinstance(of_topic, Mapping) else ()
        )
        if unknown:
            raise ConfigurationError(
                f"from_kafka({setting}=): topic {topic!r} has {partitions[topic]} partitions, and no partition "
                f"{unknown[0]}; remove it"
            )


def times_in(given: object) -> Iterator[int]:
    """Yields the times in a checked `Start` or `End` (or None), in ms since 1970."""
    for place in () if given is None else _places(given):
        if isinstance(place, AtTime):
            yield place.at_ms


def _words(given: object) -> Iterator[str]:
    for place in _places(given):
        if isinstance(place, str):
            yield place


def _places(given: object, offsets: bool = False) -> Iterator[Place]:
    if not isinstance(given, Mapping):
        yield _place(given, offsets)
        return
    for below in given.values():
        yield from _places(below, offsets=isinstance(below, Mapping) or offsets)


def _place(given: Any, offsets: bool) -> Place:
    if isinstance(given, str):
        return given
    if isinstance(given, datetime):
        # Records have whole milliseconds. The first one at or after a time within a millisecond is at the next.
        return AtTime(-((_EPOCH - given) // timedelta(milliseconds=1)))
    return AtOffset(given) if offsets else AtTime(given)


def _check_one(given: object, words: Sequence[str], setting: str, numbers: str, where: str) -> None:
    if isinstance(given, datetime):
        if given.tzinfo is None:
            raise ConfigurationError(f"from_kafka({setting}={given!r}){where}: give the time zone (tzinfo=)")
        return
    known = ", ".join(map(repr, words))
    if isinstance(given, bool) or (given not in words if isinstance(given, str) else not isinstance(given, int)):
        raise ConfigurationError(f"from_kafka({setting}={given!r}){where}: give {known}, {numbers}, or places by topic")
