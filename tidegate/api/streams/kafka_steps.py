"""Builds `Stream.to_kafka`: a step that converts rows to Kafka records, and the sink that writes the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, get_args

from tidegate.api.streams.expression_columns import known_schema
from tidegate.api.streams.output_steps import partitioned_by_key, to_sink
from tidegate.api.streams.step import Step, StepOptions
from tidegate.connectors.formats.format import Format, PayloadUse
from tidegate.connectors.formats.named import PayloadFormat, check_registry, format_named
from tidegate.connectors.kafka.encoding import RecordLayout
from tidegate.connectors.kafka.options import is_topic_name
from tidegate.connectors.kafka.producer import PARTITIONERS, TRANSACTION_MS_MAX, check_properties, library
from tidegate.connectors.kafka.sink import Delivery, KafkaSink, KafkaTarget
from tidegate.operators.aggregates.column_expressions import column_names
from tidegate.operators.changes import CHANGE
from tidegate.operators.functions.failing_rows import error_tag
from tidegate.operators.sinks.kafka_sink import KafkaAtLeastOnce, KafkaRecords
from tidegate.operators.sinks.sink import FLUSH_BYTES
from tidegate.protocol.edges import OutputTag
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.units import parse_duration_ms

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

    from tidegate.api.streams.changelog_mode import ChangelogMode
    from tidegate.api.streams.stream import Stream
    from tidegate.connectors.formats.registry import SchemaRegistry


@dataclass(frozen=True, slots=True)
class RecordParts:
    """The parameters of `to_kafka` that define how a row becomes a record: topic, key, value, formats, headers,
    partition and timestamp.
    """

    topic: str | pl.Expr
    key: str | Sequence[str]
    value: str | Sequence[str] | None
    format: PayloadFormat
    key_format: PayloadFormat | None
    registry: SchemaRegistry | str | None
    headers: Mapping[str, str] | str | None
    partition: str | None
    timestamp: str | None


@dataclass(frozen=True, slots=True)
class KafkaOptions:
    """The parameters of `to_kafka` for writing: delivery guarantee, topic creation, partitioner and client settings."""

    delivery: Delivery
    create: bool | int
    partitioner: str
    delivery_timeout: str | timedelta | int
    token_topic: str
    transactional_id_prefix: str
    properties: Mapping[str, object] | None


def to_kafka(
    stream: Stream,
    servers: str,
    parts: RecordParts,
    given: KafkaOptions,
    errors_to: OutputTag | str | None,
    options: StepOptions,
) -> Stream:
    """Builds the steps of `Stream.to_kafka`.

    Returns the stream of records. Raises ConfigurationError for arguments that are not valid.
    """
    library()
    schema = known_schema(stream, "to_kafka")
    changelog = stream._changelog
    topic, topic_column = _topic(parts.topic)
    parts = _parts_of_changes(parts, topic_column, changelog, given.delivery)
    target = _target(servers, topic, given)
    deletes = changelog is not None and changelog.changes
    layout = replace(_layout(schema, topic, topic_column, parts, deletes), replaces=changelog is not None)
    layout.check(schema)
    target.keyed, target.timed = bool(layout.key), layout.timestamp is not None
    if changelog is not None:
        changelog.check_kind_is_no_key("to_kafka", layout.columns)
        changelog.check_upsert("to_kafka", layout.key)
        _check_one_place(layout, given.partitioner, changelog)
        if changelog.changes and not changelog.recorded and given.delivery != "exactly_once":
            raise changelog.refuse(
                'to_kafka(delivery="at_least_once")',
                "after a failure a key that was deleted before its change comes again could stay in the topic; use "
                'delivery="exactly_once"',
            )
    tag = None if errors_to is None else error_tag(errors_to, schema, "to_kafka")
    uid = stream._program.new_uid(options.name, options.uid)
    rows = stream if changelog is None else partitioned_by_key(stream, layout.key, options.parallelism)
    records = rows._then(
        Step(
            operator=partial(KafkaRecords, target, layout, tag, deletes=deletes),
            schema=layout.schema,
            options=StepOptions(f"{options.name} records", f"{uid}-records", options.parallelism, slot=options.slot),
            changelog=None if deletes else changelog,
            takes_changes=deletes,
            side_outputs=() if tag is None else (tag,),
        )
    )
    # Records are rows like any others: a record that replaces another one is written after it.
    records = records._derived(timestamp=None)
    sink = KafkaSink(target) if given.delivery == "exactly_once" else KafkaAtLeastOnce(target)
    # At least once records are sent without delay.
    flush_bytes = FLUSH_BYTES if given.delivery == "exactly_once" else 1
    to_sink(records, sink, (), flush_bytes, StepOptions(options.name, uid, options.parallelism, slot=options.slot))
    return records


def _parts_of_changes(
    parts: RecordParts, topic_column: str | None, changelog: ChangelogMode | None, delivery: Delivery
) -> RecordParts:
    """For formats that write upserts or changes, returns the parts of a record with the keys of the stream as the
    record key.

    For other formats `parts` is returned unchanged. Raises ConfigurationError for a stream without changes.
    """
    form = format_named(parts.format, parts.registry, "to_kafka")
    if form.writes == "rows":
        return parts
    where = f"to_kafka(format={form.kind!r})"
    if changelog is None:
        raise ConfigurationError(
            f"{where} writes changes, and rows of this stream are only added. Use format='json', or make a stream of "
            "changes, with aggregate(emit='changes') or as_changes(keys=[...])"
        )
    if form.writes == "changes" and not changelog.changes:
        raise ConfigurationError(
            f"{where}: {changelog.made_by} emits updates, which do not have the row before. Use emit='changes' there, "
            "or format='upsert'"
        )
    key = column_names(parts.key, "to_kafka: key=") or changelog.keys
    if not key or changelog.keyless:
        raise ConfigurationError(
            f"{where}: the changes of {changelog.made_by} have no key"
            + (", because a step has dropped it; keep its columns" if changelog.keyless else "; group by a column")
        )
    if form.writes == "upserts":
        return replace(parts, key=key)
    if topic_column is not None:
        raise ConfigurationError(f"{where}: a topic is a table; give its name, and filter the stream for each topic")
    if parts.key_format is not None:
        raise ConfigurationError(f"{where}: keys are objects, as Debezium writes them; remove key_format=")
    if delivery != "exactly_once":
        raise ConfigurationError(
            f'{where}: after a failure events would come again with another row in "before"; use '
            'delivery="exactly_once", or format="upsert"'
        )
    if isinstance(parts.format, Format):
        return replace(parts, key=key, key_format=form)
    # The format has the registry now.
    return replace(parts, key=key, format=form, key_format=form, registry=None)


def _check_one_place(layout: RecordLayout, partitioner: str, changelog: ChangelogMode) -> None:
    """Raises ConfigurationError if records with the same key could be written to several partitions.

    Records of different partitions have no order.
    """
    for part, column in (("topic", layout.topic), ("partition", layout.partition)):
        if column is not None and column not in layout.key:
            raise ConfigurationError(
                f"to_kafka({part}=): rows of {changelog.made_by} replace earlier ones, and records of one key would be "
                f"in several places when its column {column!r} changes; add {column!r} to key="
            )
    if partitioner == "random":
        raise ConfigurationError(
            f"to_kafka(partitioner='random'): rows of {changelog.made_by} replace earlier ones, and records of one key "
            "would have no order; choose another partitioner"
        )


def _topic(topic: object) -> tuple[str | None, str | None]:
    """Returns the name of the topic and None, or None and the name of the column with the topic of each row.

    Raises ConfigurationError for other values.
    """
    if isinstance(topic, str):
        if not is_topic_name(topic):
            raise ConfigurationError(
                f"to_kafka(topic={topic!r}): a name has 1 to 249 letters, digits, dots, underscores and hyphens. For a "
                "column with names give pl.col(...)"
            )
        return topic, None
    import polars as pl

    if isinstance(topic, pl.Expr) and topic.meta.is_column():
        return None, topic.meta.output_name()
    raise ConfigurationError(
        f"to_kafka(topic={topic!r}): give a name, or a column as pl.col(...). Compute it in a step before"
    )


def _target(servers: str, topic: str | None, given: KafkaOptions) -> KafkaTarget:
    if not isinstance(servers, str) or not servers:
        raise ConfigurationError(f"to_kafka({servers!r}): give the brokers, 'host:port,host:port'")
    if given.delivery not in get_args(Delivery):
        raise ConfigurationError(f"to_kafka(delivery={given.delivery!r}): give 'exactly_once' or 'at_least_once'")
    if given.partitioner not in PARTITIONERS:
        raise ConfigurationError(
            f"to_kafka(partitioner={given.partitioner!r}): give one of {', '.join(PARTITIONERS)}; for partitions of "
            "your own give partition=, a column with their numbers"
        )
    create = given.create
    if not isinstance(create, int) or (not isinstance(create, bool) and create < 1):
        raise ConfigurationError(f"to_kafka(create={create!r}): give True, or the number of partitions")
    if create is not False and topic is None:
        raise ConfigurationError("to_kafka(create=): the topics in a column are not known at submission; create them")
    properties = dict(given.properties or {})
    check_properties(properties)
    timeout_ms = parse_duration_ms(given.delivery_timeout, setting="to_kafka(delivery_timeout)")
    if timeout_ms < 1_000:
        raise ConfigurationError(
            f"to_kafka(delivery_timeout={given.delivery_timeout!r}) is too short: give at least a second"
        )
    if timeout_ms > TRANSACTION_MS_MAX and given.delivery == "exactly_once":
        raise ConfigurationError(
            f"to_kafka(delivery_timeout={given.delivery_timeout!r}) is too long: a transaction of Kafka takes 15 "
            "minutes at most; give less"
        )
    if not is_topic_name(given.token_topic):
        raise ConfigurationError(
            f"to_kafka(token_topic={given.token_topic!r}) is not the name of a topic; give 1 to 249 letters, digits, "
            "dots, underscores and hyphens"
        )
    if given.token_topic == topic:
        raise ConfigurationError(f"to_kafka: topic {topic!r} is the token topic, too; give token_topic= another name")
    prefix = given.transactional_id_prefix
    if not isinstance(prefix, str) or not prefix:
        raise ConfigurationError(f"to_kafka(transactional_id_prefix={prefix!r}): give a string that is not empty")
    return KafkaTarget(
        servers,
        topic,
        given.delivery,
        create,
        given.partitioner,
        timeout_ms,
        given.token_topic,
        prefix,
        properties,
    )


def _layout(
    schema: pa.Schema, topic: str | None, topic_column: str | None, parts: RecordParts, changes: bool
) -> RecordLayout:
    """Returns which columns records are made of. `changes` is whether the rows are changes, so that the column
    `row_kind` is no value.
    """
    headers = parts.headers
    if headers is not None and not isinstance(headers, str | Mapping):
        raise ConfigurationError(
            f"to_kafka(headers={headers!r}): give {{header: column}}, or the name of a column of headers"
        )
    if isinstance(headers, Mapping) and (strange := [name for name in headers if not isinstance(name, str)]):
        raise ConfigurationError(f"to_kafka(headers=): the header {strange[0]!r} is not a name; give a str")
    key = column_names(parts.key, "to_kafka: key=")
    aside = {topic_column, parts.partition, headers if isinstance(headers, str) else None}
    if changes:
        aside.add(CHANGE)
    value = (
        tuple(name for name in schema.names if name not in aside)
        if parts.value is None
        else column_names(parts.value, "to_kafka: value=")
    )
    if not value:
        raise ConfigurationError(
            f"to_kafka(value={parts.value!r}): there is no column for the value; name one of {schema.names}"
        )
    for part, columns in (("value", value), ("key", key)):
        if twice := [name for name in columns if columns.count(name) > 1]:
            raise ConfigurationError(f"to_kafka({part}=): column {twice[0]!r} is there twice; name it once")
    for name in (*value, *key):
        if name not in schema.names:
            raise ConfigurationError(
                f"to_kafka: there is no column {name!r}; the stream has {schema.names}; name one of these"
            )
    topics = () if topic is None else (topic,)
    key_format = parts.key_format
    if key_format is None and key:
        raw = len(key) == 1 and str(schema.field(key[0]).type) in ("string", "large_string", "binary", "large_binary")
        key_format = "raw" if raw else "json"
    registry = parts.registry
    check_registry(registry, "to_kafka", parts.format, key_format)
    value_format = format_named(parts.format, registry, "to_kafka")
    written = None
    if key and key_format is not None:
        named = format_named(key_format, registry, "to_kafka", "key_format")
        written = named.for_writing(_of(schema, key), PayloadUse("to_kafka", topics, "key", key))
    return RecordLayout(
        value,
        value_format.for_writing(_of(schema, value), PayloadUse("to_kafka", topics, "value", key)),
        key,
        written,
        topic_column,
        parts.partition,
        parts.timestamp,
        headers,
    )


def _of(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    import pyarrow as pa

    return pa.schema([schema.field(name) for name in columns])
