"""A client of a schema registry that has Confluent's REST interface. The wire format is in `wire_format.py`.

Rules:

- Each request has a time limit, and is retried a bounded number of times if the registry does not answer or reports a
  temporary error (5xx, 429). Then a `RegistryError` fails the task, which restarts by its restart strategy.
- A registry may have several addresses, which are tried in turn.
- The schema of an id never changes. Up to CACHED_MAX schemas are cached in memory.
- An id that the registry does not have makes its records bad. It is requested again after UNKNOWN_MS.
- Redirects are refused, because they could carry the password to another server.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from tidegate.connectors.formats.format import PayloadUse
from tidegate.storage.clock import monotonic_ms
from tidegate.storage.errors import ConfigurationError, StorageError

CACHED_MAX = 1_000
UNKNOWN_MS = 10_000
TRIES = 4
_PAUSE_S = 0.2
_ANSWER_BYTES_MAX = 16 * 1024 * 1024
_REFERENCES_MAX = 200
_HEADERS = {
    "Content-Type": "application/vnd.schemaregistry.v1+json",
    "Accept": "application/vnd.schemaregistry.v1+json, application/json",
}
SchemaType: TypeAlias = Literal["AVRO", "PROTOBUF", "JSON"]
FORMAT_NAMES = {"AVRO": "avro", "PROTOBUF": "protobuf", "JSON": "json_schema"}
"""Names of the payload formats, by the registry's schema type."""
Subject: TypeAlias = Literal["topic", "record", "topic_record"]
"""Strategy for subject names: `orders-value` ("topic"), the full name of the record ("record"), or both
("topic_record").
"""


class RegistryError(StorageError):
    """Raised if a schema registry does not answer, or answers in an unexpected way."""


class UnknownSchemaError(StorageError):
    """Raised for an id, a subject or a schema that a registry does not have."""


class UnfitSchemaError(ConfigurationError):
    """Raised for a schema that cannot be read, or that is incompatible with the program's schema.

    The text names the field.
    """


@dataclass(frozen=True, slots=True)
class SchemaRegistry:
    """A schema registry with Confluent's REST interface.

    - `url`: its address, or several of one registry separated by commas. It may contain user and password.
    - `user`, `password`: for basic authentication. `token`: a bearer token instead.
    - `ca`: path of a file with the certificates to trust; by default the system's. `certificate`, `key`: paths of a
      client certificate and its key. The files must exist on each machine of the job.
    - `timeout_s`: time limit of one request.

    Raises ConfigurationError for an invalid address.

    Example:

        >>> tg.SchemaRegistry("https://registry:8081", user="me", password="secret")
        SchemaRegistry(url='https://registry:8081', user='me', ca=None, certificate=None, key=None, timeout_s=10.0)
    """

    url: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        plain = []
        for each in self.url.split(","):
            parts = urlsplit(each.strip())
            if parts.scheme not in ("http", "https") or not parts.hostname:
                shown = each.strip().rpartition("@")[2]  # without a password
                raise ConfigurationError(
                    f"SchemaRegistry({shown!r}): this is not an address; give one such as http://host:8081"
                )
            if parts.username is not None:
                object.__setattr__(self, "user", unquote(parts.username))
                object.__setattr__(self, "password", unquote(parts.password or ""))
            plain.append(urlunsplit((parts.scheme, parts.netloc.rsplit("@", 1)[-1], parts.path.rstrip("/"), "", "")))
        object.__setattr__(self, "url", ",".join(plain))
        if self.token is not None and self.user is not None:
            raise ConfigurationError("SchemaRegistry: give user and password, or token, not both")
        if not self.timeout_s > 0:
            raise ConfigurationError(f"SchemaRegistry(timeout_s={self.timeout_s}): it must be greater than 0")

    @staticmethod
    def of(given: SchemaRegistry | str | None) -> SchemaRegistry | None:
        """Converts a registry's address to a `SchemaRegistry`. Returns a registry and None unchanged.

        Raises ConfigurationError for other values.
        """
        if given is not None and not isinstance(given, str | SchemaRegistry):
            raise ConfigurationError(f"registry={given!r}: give the address of a registry, or a tg.SchemaRegistry")
        return SchemaRegistry(given) if isinstance(given, str) else given


def schema_text(given: object, method: str, names: Collection[str] = ()) -> str | None:
    """Returns the JSON of a schema that a user gives to a format, as JSON or as Python values. None if it is None.

    `names` are names of types that need no JSON. Whether the schema is valid is checked later, because it may use names
    that a registry defines. Raises ConfigurationError, which begins with `method`.
    """
    if given is None or (isinstance(given, str) and given in names):
        return given
    try:
        text = given if isinstance(given, str) else json.dumps(given)
        found = json.loads(text)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{method}(schema={_shortened(given)}): this is not JSON: {error}; give the schema as JSON, or as a dict"
        ) from error
    if not isinstance(found, dict | list | str if names else dict):
        raise ConfigurationError(
            f"{method}(schema={_shortened(given)}): this is no schema; give the schema as JSON, or as a dict"
        )
    return text


def _shortened(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 80 else f"{text[:80]}..."


@dataclass(frozen=True, slots=True)
class RegisteredSchema:
    """A schema in a registry. `references`: name and text of each schema that it uses, dependencies first."""

    schema_id: int
    kind: SchemaType
    text: str
    references: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ImportedSchema:
    """A schema that others use by its `name`, which is also its subject, as in Confluent's serializers.

    `imports`: names of the schemas that it uses itself.
    """

    name: str
    text: str
    imports: tuple[str, ...] = ()


class RegistryClient:
    """Sends requests to a schema registry, and caches schemas and ids."""

    def __init__(
        self, registry: SchemaRegistry, pause_s: Callable[[float], None] = time.sleep, *, serialized: bool = False
    ) -> None:
        """Opens no connection. `serialized`: the registry returns Protobuf schemas as descriptors in Base64 instead of
        text.

        Raises ConfigurationError for certificates that cannot be read.
        """
        self.registry = registry
        self._query = "?format=serialized" if serialized else ""
        self._pause = pause_s
        self._urls = registry.url.split(",")
        self._headers = dict(_HEADERS)
        if registry.user is not None:
            pair = f"{registry.user}:{registry.password or ''}".encode()
            self._headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
        elif registry.token is not None:
            self._headers["Authorization"] = f"Bearer {registry.token}"
        secure = any(url.startswith("https:") for url in self._urls)
        handlers = [urllib.request.HTTPSHandler(context=_tls(registry))] if secure else []
        self._open = urllib.request.build_opener(_NoRedirects(), *handlers).open
        self._schemas: OrderedDict[int, RegisteredSchema] = OrderedDict()
        self._unknown: OrderedDict[int, int] = OrderedDict()
        self._ids: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._lock = threading.Lock()

    def by_id(self, schema_id: int) -> RegisteredSchema:
        """Returns the schema with an id. Raises UnknownSchemaError, RegistryError."""
        with self._lock:
            if (known := self._schemas.get(schema_id)) is not None:
                self._schemas.move_to_end(schema_id)
                return known
            now_ms = monotonic_ms()
            if now_ms - self._unknown.get(schema_id, now_ms - UNKNOWN_MS) < UNKNOWN_MS:
                raise UnknownSchemaError(
                    f"the schema registry at {self.registry.url} has no schema with the id {schema_id}; check that "
                    "the records are from this registry"
                )
            try:
                answer = self._request("GET", f"/schemas/ids/{schema_id}{self._query}")
            except UnknownSchemaError:
                _remember(self._unknown, schema_id, now_ms)
                raise
            found = self._registered(schema_id, answer)
            _remember(self._schemas, schema_id, found)
            return found

    def latest(self, subject: str) -> RegisteredSchema:
        """Returns the newest schema of a subject. Raises UnknownSchemaError, RegistryError."""
        answer = self._request("GET", f"/subjects/{quote(subject, safe='')}/versions/latest{self._query}")
        return self._registered(_integer(answer, "id"), answer)

    def id_of(
        self,
        subject: str,
        kind: SchemaType,
        text: str,
        *,
        register: bool,
        imports: Sequence[str] = (),
        imported: Sequence[ImportedSchema] = (),
    ) -> int:
        """Returns the id that a schema has under a subject. With `register`, a missing schema is registered.

        `imports`: the names of the schemas that it uses. `imported`: these schemas, and the schemas that they use,
        dependencies first; a missing one is registered under its name.

        Raises UnknownSchemaError if a schema is missing, ConfigurationError if the registry refuses it,
        RegistryError.
        """
        with self._lock:
            if (known := self._ids.get((subject, text))) is not None:
                return known
            references: dict[str, dict[str, object]] = {}
            for each in imported:
                path, body = _looked_up(each.name, kind, each.text, [references[name] for name in each.imports])
                try:
                    answer = self._request("POST", path, body)
                except UnknownSchemaError:
                    if not register:
                        raise
                    self._request("POST", f"{path}/versions", body)
                    answer = self._request("POST", path, body)
                version = _integer(answer, "version")
                references[each.name] = {"name": each.name, "subject": each.name, "version": version}
            path, body = _looked_up(subject, kind, text, [references[name] for name in imports])
            found = _integer(self._request("POST", f"{path}/versions" if register else path, body), "id")
            _remember(self._ids, (subject, text), found)
            return found

    def _registered(self, schema_id: int, answer: Mapping[str, Any]) -> RegisteredSchema:
        kind = answer.get("schemaType", "AVRO")
        text = answer.get("schema")
        if kind not in ("AVRO", "PROTOBUF", "JSON") or not isinstance(text, str):
            raise RegistryError(
                f"the registry at {self.registry.url} returned no schema: {_shown(answer)}; check that the address is "
                "a schema registry"
            )
        found: dict[str, str] = {}
        self._add_references(answer.get("references") or (), found)
        return RegisteredSchema(schema_id, kind, text, tuple(found.items()))

    def _add_references(self, references: Sequence[Mapping[str, Any]], found: dict[str, str]) -> None:
        """Adds the schemas that `references` name to `found`, each after the schemas that it uses."""
        for each in references:
            if each["name"] in found:
                continue
            if len(found) >= _REFERENCES_MAX:
                raise RegistryError(
                    f"a schema has more than {_REFERENCES_MAX} references, which is the limit; register a schema with "
                    "fewer references"
                )
            path = f"/subjects/{quote(each['subject'], safe='')}/versions/{each['version']}{self._query}"
            answer = self._request("GET", path)
            found[each["name"]] = ""
            below: dict[str, str] = dict.fromkeys(found, "")
            self._add_references(answer.get("references") or (), below)
            del found[each["name"]]
            found.update({name: text for name, text in below.items() if text})
            found[each["name"]] = str(answer["schema"])

    def _request(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Mapping[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        failure: object = None
        for attempt in range(TRIES):
            url = self._urls[attempt % len(self._urls)]
            if attempt and attempt % len(self._urls) == 0:
                self._pause(_PAUSE_S * 2 ** (attempt // len(self._urls)))
            request = urllib.request.Request(url + path, data=data, headers=self._headers, method=method)
            try:
                with self._open(request, timeout=self.registry.timeout_s) as answer:
                    return _parsed(answer.read(_ANSWER_BYTES_MAX), url)
            except urllib.error.HTTPError as error:
                with error:
                    failure = self._refusal(error, url, path)
            except (OSError, http.client.HTTPException) as error:
                failure = error
        raise RegistryError(
            f"the schema registry at {self.registry.url} does not answer: {failure}; check that it runs, and its "
            "address"
        )

    def _refusal(self, error: urllib.error.HTTPError, url: str, path: str) -> str:
        """Returns the reason of an HTTP error after which a retry may succeed. Raises an exception for any other
        error.
        """
        text = _message(error.read(_ANSWER_BYTES_MAX))
        if error.code == 429 or error.code >= 500:
            return f"{error.code} {text}"
        where = f"the schema registry at {url}"
        if error.code == 404:
            raise UnknownSchemaError(f"{where} does not have {path}: {text}; register it, or correct the name")
        if error.code in (401, 403):
            raise ConfigurationError(f"{where} refuses access ({error.code} {text}); correct user and password")
        if error.code in (409, 422):
            raise ConfigurationError(
                f"{where} refuses the schema for {path}: {text}; make it compatible with the registered versions, or "
                "change the compatibility of the subject"
            )
        raise RegistryError(
            f"{where} answers {error.code} to {path}: {text}; check the address of the registry and its log"
        )


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def _tls(registry: SchemaRegistry) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=registry.ca)
        if registry.certificate is not None:
            context.load_cert_chain(registry.certificate, registry.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"SchemaRegistry: the certificates cannot be loaded: {error}; give the paths of PEM files that this "
            "process can read"
        ) from error
    return context


def _parsed(data: bytes, url: str) -> Mapping[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise RegistryError(f"the answer of {url} is not JSON; check that the address is a schema registry") from error
    if not isinstance(found, dict):
        raise RegistryError(
            f"the answer of {url} is not an object: {_shown(found)}; check that the address is a schema registry"
        )
    return found


def _message(data: bytes) -> str:
    try:
        return str(json.loads(data)["message"])
    except (ValueError, KeyError, TypeError):
        return data[:200].decode("utf-8", "replace")


def _looked_up(
    subject: str, kind: SchemaType, text: str, references: list[dict[str, object]]
) -> tuple[str, dict[str, object]]:
    """Returns the path of a subject, and the body of a request that looks a schema up there or registers it."""
    body: dict[str, object] = {"schema": text}
    if kind != "AVRO":
        body["schemaType"] = kind
    if references:
        body["references"] = references
    return f"/subjects/{quote(subject, safe='')}", body


def _integer(answer: Mapping[str, Any], name: str) -> int:
    if not isinstance(answer.get(name), int):
        raise RegistryError(
            f"the schema registry returned an answer without an integer {name!r}: {_shown(answer)}; check the address "
            "of the registry"
        )
    return int(answer[name])


def _shown(answer: object) -> str:
    return repr(answer)[:200]


def _remember(cache: OrderedDict[Any, Any], name: object, value: object) -> None:
    cache[name] = value
    cache.move_to_end(name)
    while len(cache) > CACHED_MAX:
        cache.popitem(last=False)


def subject_of(strategy: Subject, topic: str, record: str, use: PayloadUse) -> str:
    """Returns the name of a subject by Confluent's naming strategies. `record`: the full name of the record."""
    if strategy == "record":
        return record
    return f"{topic}-{record}" if strategy == "topic_record" else f"{topic}-{use.part}"


def check_subject(strategy: object, kind: str) -> None:
    """Raises ConfigurationError for an unknown subject naming strategy."""
    if strategy not in ("topic", "record", "topic_record"):
        raise ConfigurationError(f"format {kind!r}: subject={strategy!r}: give 'topic', 'record' or 'topic_record'")


def newest_schemas(
    client: RegistryClient, strategy: Subject, kind: SchemaType, use: PayloadUse
) -> dict[str, RegisteredSchema]:
    """Returns the newest schema of each topic that has one, by topic. Raises ConfigurationError, RegistryError.

    Returns an empty dict for the strategies "record" and "topic_record": their subjects contain the name of the record,
    which is only known from its schema.
    """
    found: dict[str, RegisteredSchema] = {}
    for topic in use.topics if strategy == "topic" else ():
        subject = subject_of(strategy, topic, "", use)
        try:
            found[topic] = client.latest(subject)
        except UnknownSchemaError:
            continue
        if found[topic].kind != kind:
            raise ConfigurationError(
                f"{use.method}(format={FORMAT_NAMES[kind]!r}): the subject {subject!r} has a schema of type "
                f"{found[topic].kind}; give format={FORMAT_NAMES[found[topic].kind]!r}"
            )
    return found


def schema_of_topics(newest: Mapping[str, RegisteredSchema], where: str, advice: str) -> RegisteredSchema:
    """Returns the schema that all topics share.

    Raises ConfigurationError, with `advice`, if they have different ones or none.
    """
    if len({(found.text, found.references) for found in newest.values()}) != 1:
        raise ConfigurationError(
            f"{where}: the topics have {'different schemas' if newest else 'no schema in the registry'}; {advice}"
        )
    return next(iter(newest.values()))


@dataclass(frozen=True, slots=True)
class WrittenSchema:
    """The schema with which a sink writes, and the way in which its id for a topic is determined.

    - `record`: the full name of its record, for subject names.
    - `register`: whether the schema is registered under a subject that does not have it.
    - `known`: ids that were found at submission, by topic.
    - `imports`: names of the schemas that it uses.
    - `imported`: these schemas, and the schemas that they use, dependencies first.
    """

    registry: SchemaRegistry
    kind: SchemaType
    text: str
    record: str
    strategy: Subject
    register: bool
    use: PayloadUse
    known: Mapping[str, int] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    imported: tuple[ImportedSchema, ...] = ()

    def check(self) -> None:
        """Requests the ids for the topics that are known at submission, to detect errors.

        Raises ConfigurationError, RegistryError.
        """
        ids = SubjectIds(self)
        for topic in self.use.topics:
            ids.of(topic)


class SubjectIds:
    """Looks up the id of a sink's schema, by topic. Used by one thread."""

    def __init__(self, schema: WrittenSchema) -> None:
        self._schema = schema
        self._client = RegistryClient(schema.registry)

    def of(self, topic: str) -> int:
        """Returns the id of the schema for a topic. Raises ConfigurationError, RegistryError."""
        schema = self._schema
        if topic in schema.known:
            return schema.known[topic]
        subject = subject_of(schema.strategy, topic, schema.record, schema.use)
        try:
            return self._client.id_of(
                subject,
                schema.kind,
                schema.text,
                register=schema.register,
                imports=schema.imports,
                imported=schema.imported,
            )
        except UnknownSchemaError as error:
            raise ConfigurationError(
                f"{schema.use.method}(format={FORMAT_NAMES[schema.kind]!r}): {error}. Register the schema, or set "
                "auto_register=True in the format"
            ) from error
