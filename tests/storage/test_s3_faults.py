"""How the S3 store behaves when the server does not: a scripted server answers what a test tells it to."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import botocore.session
import pytest
from seaweed import BUCKET, S3Server

from tidegate.storage.errors import AlreadyExistsError, ConfigurationError, NotFoundError, StorageError
from tidegate.storage.files import s3_files
from tidegate.storage.files.file_system import OF_THIS_PROCESS
from tidegate.storage.files.file_system_store import FileSystemStore, check_conditional_create, open_store

models_read_once = cache(botocore.session.create_loader)
"""The models of AWS's services, which each client would read again: that is most of what these tests cost."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and S3 error code of one answer; `condition` is what AWS adds to a failed condition."""

    status: int
    code: str = ""
    condition: str = ""
    message: str = "scripted"

    @property
    def body(self) -> bytes:
        """The error document, or nothing for a success."""
        if not self.code:
            return b""
        condition = f"<Condition>{self.condition}</Condition>" if self.condition else ""
        return f"<Error><Code>{self.code}</Code><Message>{self.message}</Message>{condition}</Error>".encode()


@dataclass(slots=True)
class ScriptedS3:
    """Answers each request with the next answer of the script, the last one for ever; keeps requests."""

    url: str
    script: list[Answer] = field(default_factory=lambda: [Answer(200)])
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def store(self) -> FileSystemStore:
        """A store on this server."""
        return open_store("s3://bucket/x", endpoint_url=self.url, key="k", secret="s", timeout_ms=20_000)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedS3]:
    """A server on loopback, stopped after the test. Whoever meets it comes back soon."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(s3_files, "PAUSE_S_FIRST", 0.001)
    monkeypatch.setattr(botocore.session, "create_loader", models_read_once)
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    state = ScriptedS3(f"http://127.0.0.1:{server.server_address[1]}")

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            state.requests.append((self.command, dict(self.headers)))
            answer = state.script.pop(0) if len(state.script) > 1 else state.script[0]
            self.send_response(answer.status)
            self.send_header("Content-Length", str(len(answer.body)))
            self.send_header("ETag", '"x"')
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the requests are kept, and stderr belongs to the test run."""

    server.RequestHandlerClass = Handler
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    "lost",
    [Answer(412, "PreconditionFailed", "If-None-Match"), Answer(412, "PreconditionFailed"), Answer(412)],
    ids=["as AWS", "without condition", "without body"],
)
def test_a_lost_create_is_told_in_every_dialect(scripted: ScriptedS3, lost: Answer) -> None:
    """Each way in which servers say that the name is taken is AlreadyExistsError, at the first request."""
    scripted.script = [lost]

    with pytest.raises(AlreadyExistsError):
        scripted.store().create("f", b"data")
    assert len(scripted.requests) == 1


@pytest.mark.parametrize(
    "refused", [Answer(400, "InvalidArgument"), Answer(400, "BadDigest"), Answer(403, "AccessDenied")]
)
def test_a_bad_request_is_not_a_lost_create(scripted: ScriptedS3, refused: Answer) -> None:
    """A request that the server refuses for another reason does not claim that the file is there."""
    scripted.script = [refused]

    with pytest.raises(StorageError, match="scripted") as caught:
        scripted.store().create("f", b"data")
    assert not isinstance(caught.value, AlreadyExistsError)


def test_an_ambiguous_create_is_not_repeated(scripted: ScriptedS3) -> None:
    """After a server error the create may have happened: a second try could lose against itself."""
    scripted.script = [Answer(500, "InternalError"), Answer(412, "PreconditionFailed")]

    with pytest.raises(StorageError) as caught:
        scripted.store().create("f", b"data")
    assert not isinstance(caught.value, AlreadyExistsError)
    assert len(scripted.requests) == 1


@pytest.mark.parametrize("busy", [Answer(409, "ConditionalRequestConflict"), Answer(503, "SlowDown")])
def test_a_create_that_was_not_applied_is_tried_again(scripted: ScriptedS3, busy: Answer) -> None:
    """An answer that says that nothing was done is followed by another, still conditional, attempt."""
    scripted.script = [busy, busy, Answer(200)]
    before = OF_THIS_PROCESS.s3_requests, OF_THIS_PROCESS.retries

    scripted.store().create("f", b"data")

    assert [headers.get("If-None-Match") for _, headers in scripted.requests] == ["*"] * 3
    assert (OF_THIS_PROCESS.s3_requests - before[0], OF_THIS_PROCESS.retries - before[1]) == (3, 2)


@pytest.mark.slow
def test_a_create_gives_up_on_a_busy_server(scripted: ScriptedS3) -> None:
    """The attempts are bounded."""
    scripted.script = [Answer(503, "SlowDown")]

    with pytest.raises(StorageError, match="cannot create"):
        scripted.store().create("f", b"data")
    assert 1 < len(scripted.requests) <= 5


def test_a_write_survives_a_server_error(scripted: ScriptedS3) -> None:
    """Replacing a file may be repeated, and is."""
    scripted.script = [Answer(500, "InternalError"), Answer(200)]

    assert scripted.store().write("f", [b"data"]) == 4
    assert [method for method, _ in scripted.requests] == ["PUT", "PUT"]


def test_no_request_waits_to_be_continued(scripted: ScriptedS3) -> None:
    """No put asks for `100 Continue`: a server that never answers that would hold it for ever."""
    store = scripted.store()
    store.write("f", [b"data"])
    store.create("g", b"data")

    assert [headers.get("Expect") for _, headers in scripted.requests] == [None, None]


def test_a_server_that_overwrites_is_refused(scripted: ScriptedS3) -> None:
    """A server that answers 200 to both conditional creates cannot keep exactly-once."""
    with pytest.raises(ConfigurationError, match="has no conditional create"):
        check_conditional_create(scripted.store())


@pytest.mark.parametrize("message", ["scripted", ""])
@pytest.mark.parametrize(
    ("status", "code"), [(404, "NoSuchBucket"), (403, "InvalidAccessKeyId"), (400, "BadDigest"), (507, "QuotaExceeded")]
)
def test_errors_name_the_code(scripted: ScriptedS3, status: int, code: str, message: str) -> None:
    """With the HTTP status, also where the server sends no message, as Ceph does."""
    scripted.script = [Answer(status, code, message=message)]
    store = scripted.store()

    for operation in (lambda: store.write("f", [b"x"]), lambda: store.read("f"), lambda: store.list("")):
        with pytest.raises(StorageError, match=rf"{code} \(HTTP {status}\)") as caught:
            operation()
        assert "None" not in str(caught.value)


@pytest.mark.parametrize("where", ["option", "client_kwargs", "environment"])
def test_an_endpoint_without_a_scheme_is_refused(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the store is opened, with the place where it was given."""
    options: dict[str, object] = {"key": "k", "secret": "s"}
    if where == "option":
        options["endpoint_url"] = "localhost:9000"
    elif where == "client_kwargs":
        options["client_kwargs"] = {"endpoint_url": "localhost:9000"}
    else:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")

    with pytest.raises(
        ConfigurationError, match=f"'localhost:9000' in the {where}|'localhost:9000' in {where}"
    ) as caught:
        open_store("s3://bucket/x", **options)
    assert "http://localhost:9000" in str(caught.value)


@pytest.mark.parametrize(
    "operation",
    [
        lambda store: store.create("f", b"x"),
        lambda store: store.write("f", [b"x"]),
        lambda store: store.read("f"),
        lambda store: store.list(""),
    ],
    ids=["create", "write", "read", "list"],
)
def test_a_silent_server_is_given_up(
    operation: Callable[[FileSystemStore], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that takes connections and never answers makes every operation fail within its bound."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        store = open_store("s3://bucket/x", endpoint_url=url, key="k", secret="s", timeout_ms=100)

        with pytest.raises(StorageError, match=r"within|[Tt]imeout"):
            operation(store)


def test_wrong_credentials_are_named(s3_server: S3Server) -> None:
    """A refused signature is a StorageError that tells the user to look at the credentials."""
    store = open_store(f"s3://{BUCKET}/x", **(s3_server.options | {"secret": "wrong"}))

    with pytest.raises(StorageError, match="check credentials"):
        store.write("f", [b"x"])


def test_a_missing_bucket_is_not_a_missing_file(s3_server: S3Server) -> None:
    """Without the bucket nothing can be known about a file, so the error is not NotFoundError."""
    store = open_store("s3://no-such-bucket/x", **s3_server.options)

    with pytest.raises(StorageError, match="bucket does not exist") as caught:
        store.read("f")
    assert not isinstance(caught.value, NotFoundError)
