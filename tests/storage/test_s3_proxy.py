"""S3 over the wire when the wire, or the server, is in a bad way: a real server behind a proxy that breaks things."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest
from s3_proxy import Request, S3Proxy, run_proxy
from seaweed import BUCKET, S3Server
from waiting import until

from tidegate.storage.checkpoints.event_log import EventLog, LogEntry
from tidegate.storage.errors import AlreadyExistsError, ConfigurationError, StorageError
from tidegate.storage.files import s3_files
from tidegate.storage.files.file_system_store import FileSystemStore, check_conditional_create, open_store
from tidegate.storage.files.s3_files import TRIES_MAX
from tidegate.storage.ids import Generation, JobId

PART = 5 * 1024 * 1024
"""The smallest part that an S3 server takes."""


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    """A proxy in front of the server, for one test."""
    with run_proxy(s3_server) as running:
        yield running


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads in the smallest parts that there are."""
    monkeypatch.setattr(s3_files, "PART_BYTES", PART)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow each other at once."""
    monkeypatch.setattr("tidegate.storage.files.s3_files.PAUSE_S_FIRST", 0.001)


@pytest.fixture
def open_s3(proxy: S3Proxy, s3_server: S3Server, tmp_path: Path) -> _Opener:
    """Opens stores under a prefix of this test's own, through the proxy."""
    return _Opener(proxy.url, s3_server, tmp_path.name)


class _Opener:
    def __init__(self, url: str, server: S3Server, folder: str) -> None:
        self._options = server.options | {"endpoint_url": url}
        self._folder = folder

    def __call__(self, timeout_ms: int = 20_000, **more: object) -> FileSystemStore:
        return open_store(f"s3://{BUCKET}/proxy/{self._folder}", timeout_ms=timeout_ms, **self._options, **more)


def parts_only(request: Request) -> bool:
    """Whether a request uploads a part."""
    return "partNumber=" in request.query


def completion(request: Request) -> bool:
    """Whether a request completes an upload."""
    return request.method == "POST" and "uploadId=" in request.query


def puts(request: Request) -> bool:
    """Whether a request is a put."""
    return request.method == "PUT"


def gets(request: Request) -> bool:
    """Whether a request is a get."""
    return request.method == "GET"


@pytest.mark.parametrize("action", ["busy", "cut request", "lose answer"])
def test_a_burst_of_faults_is_survived(open_s3: _Opener, proxy: S3Proxy, action: str) -> None:
    """One attempt fewer than there are may fail, at a write and at a read, and the bytes are right."""
    store = open_s3()
    data = bytes(range(256)) * 4000
    proxy.inject(action, TRIES_MAX - 1, puts)  # type: ignore[arg-type]
    store.write("f", [data])
    proxy.inject(action, TRIES_MAX - 1, gets)  # type: ignore[arg-type]

    assert store.read("f", 100, 900_000) == data[100:900_100]
    assert (len(proxy.requests("PUT")), len(proxy.requests("GET"))) == (TRIES_MAX, TRIES_MAX)


def test_a_body_that_breaks_off_is_asked_for_again(open_s3: _Opener, proxy: S3Proxy) -> None:
    """An answer of which half has arrived is no answer."""
    store = open_s3()
    store.write("f", [b"0123456789" * 1000])
    proxy.inject("cut answer", TRIES_MAX - 1, gets)

    assert store.read("f", 5, 5000) == b"5678901234" * 500
    assert len(proxy.requests("GET")) == TRIES_MAX


def test_a_server_that_stays_busy_is_given_up(open_s3: _Opener, proxy: S3Proxy) -> None:
    """The attempts are bounded, and the error names the operation, the file and what the server said."""
    store = open_s3()
    fault = proxy.inject("busy", 1_000)

    with pytest.raises(StorageError, match=r"cannot write s3://.*/f: .*injected"):
        store.write("f", [b"x"])
    assert len(proxy.requests()) == TRIES_MAX
    fault.times = 0
    store.write("f", [b"y"])
    assert store.read("f") == b"y"


def test_an_answer_that_takes_too_long_is_given_up(open_s3: _Opener, proxy: S3Proxy) -> None:
    """An answer that never comes is an error that says so, and the store is as good as new after it."""
    store = open_s3(timeout_ms=1_500)
    fault = proxy.inject("delay", 1_000)

    for operation in (lambda: store.write("f", [b"x"]), lambda: store.read("f"), lambda: store.create("g", b"x")):
        with pytest.raises(StorageError, match=r"within 1.5 s|[Tt]imeout"):
            operation()
    fault.times = 0
    fault.release.set()

    def as_good_as_new() -> bool:
        # An answer within so short a time is not to be had at once on a busy machine.
        with suppress(StorageError):
            store.write("h", [b"x"])
            return store.read("h") == b"x"
        return False

    until("an answer", as_good_as_new)


def test_one_slow_answer_is_asked_for_again(open_s3: _Opener, proxy: S3Proxy) -> None:
    """An attempt has a third of the time: one answer that is late does not use up all of it."""
    store = open_s3(timeout_ms=15_000)
    store.write("f", [b"x"])
    proxy.inject("delay", 1, gets)

    assert store.read("f") == b"x"


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("action", ["busy", "cut request", "lose answer"])
def test_parts_that_fail_are_sent_again(open_s3: _Opener, proxy: S3Proxy, action: str) -> None:
    """Faults of several parts at once leave a file that is whole and in order."""
    store = open_s3()
    chunks = [bytes([i]) * PART for i in range(5)]
    proxy.inject(action, 5, parts_only)  # type: ignore[arg-type]

    assert store.write("large", iter(chunks)) == 5 * PART
    assert store.read("large") == b"".join(chunks)


@pytest.mark.usefixtures("small_parts")
def test_parts_are_uploaded_beside_each_other_within_a_bound(open_s3: _Opener, proxy: S3Proxy) -> None:
    """While no part is answered, as many as may be in memory were asked for, all but one of them are on their way."""
    store = open_s3()
    taken: list[int] = []

    def chunks() -> Iterator[bytes]:
        for i in range(10):
            taken.append(i)
            yield bytes([i]) * PART

    fault = proxy.inject("delay", 100, parts_only)
    writer = Thread(target=lambda: store.write("large", chunks()))
    writer.start()
    in_flight = s3_files.PARTS_IN_MEMORY_MAX - 1
    for _ in range(in_flight):
        assert fault.arrived.acquire(timeout=240)
    assert not fault.arrived.acquire(timeout=0.2)
    # The chunk after the last full part is what told that the part was full.
    assert len(taken) <= s3_files.PARTS_IN_MEMORY_MAX + 1
    fault.release.set()
    writer.join(240)

    assert not writer.is_alive()
    assert store.read("large", 9 * PART) == bytes([9]) * PART


@pytest.mark.usefixtures("small_parts")
def test_an_upload_that_fails_is_aborted(open_s3: _Opener, proxy: S3Proxy) -> None:
    """After parts that cannot be uploaded there is neither a file nor an unfinished upload."""
    store = open_s3()
    proxy.inject("busy", 1_000, parts_only)

    with pytest.raises(StorageError, match="injected"):
        store.write("d/large", [bytes(3 * PART)])
    assert store.list("d") == []
    assert store.delete_temporary("d") == 0
    assert [r for r in proxy.requests("DELETE") if "uploadId=" in r.query]


@pytest.mark.usefixtures("small_parts")
def test_an_abort_that_fails_is_told_and_keeps_the_error(
    open_s3: _Opener, proxy: S3Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is why the write failed; that parts are left behind is a line of the log, and they can be cleaned."""
    store = open_s3()
    proxy.inject("busy", 1_000, parts_only)
    proxy.inject("busy", TRIES_MAX, lambda r: r.method == "DELETE")

    with caplog.at_level(logging.WARNING), pytest.raises(StorageError, match="cannot write"):
        store.write("d/large", [bytes(3 * PART)])
    assert [r.getMessage()[:26] for r in caplog.records] == ["Could not abort the upload"]
    assert store.delete_temporary("e") == 0
    assert store.delete_temporary("d") == 1
    assert store.delete_temporary("d") == 0


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("times", [1, TRIES_MAX])
def test_a_completion_that_was_not_answered_is_recognised(open_s3: _Opener, proxy: S3Proxy, times: int) -> None:
    """The upload did complete: the write says so, though the answer, or all answers, were lost."""
    store = open_s3()
    store.write("large", [b"an older file"])
    proxy.inject("lose answer", times, completion)

    assert store.write("large", [b"x" * (2 * PART)]) == 2 * PART
    assert store.read("large", 2 * PART - 3) == b"xxx"


@pytest.mark.usefixtures("small_parts")
def test_a_completion_that_did_not_happen_is_no_success(open_s3: _Opener, proxy: S3Proxy) -> None:
    """What was there before is not taken for what was uploaded."""
    store = open_s3()
    store.write("large", [b"x" * (2 * PART)])
    proxy.inject("busy", 1_000, completion)

    with pytest.raises(StorageError, match="injected"):
        store.write("large", [b"y" * (2 * PART)])
    assert store.read("large", 0, 3) == b"xxx"


@pytest.mark.usefixtures("small_parts")
def test_a_whole_write_has_a_bound(open_s3: _Opener, proxy: S3Proxy) -> None:
    """Parts that are answered, each in its time, but too many of them, do not keep a write alive."""
    store = open_s3(write_timeout_ms=300)
    proxy.inject("delay", 1, parts_only)

    def chunks() -> Iterator[bytes]:
        for _ in range(1_000):
            yield bytes(PART)

    with pytest.raises(StorageError, match=r"the write did not end within 0.3 s"):
        store.write("d/large", chunks())
    assert store.list("d") == []


def test_a_create_whose_answer_was_lost_is_neither_won_nor_lost(open_s3: _Opener, proxy: S3Proxy) -> None:
    """It is a StorageError, it was sent once, and whoever asks again finds the truth."""
    store = open_s3()
    proxy.inject("lose answer", 1, puts)

    with pytest.raises(StorageError) as caught:
        store.create("f", b"mine")
    assert not isinstance(caught.value, AlreadyExistsError)
    assert len(proxy.requests("PUT")) == 1
    assert store.read("f") == b"mine"
    with pytest.raises(AlreadyExistsError):
        store.create("f", b"mine")


def test_a_log_entry_whose_answer_was_lost_is_repeated_safely(open_s3: _Opener, proxy: S3Proxy) -> None:
    """What rests on conditional creates holds over a real wire: the entry is there once, and is the writer's own."""
    log = EventLog(open_s3(), JobId("job-12345678"))
    entry = LogEntry(0, Generation(1), 5, "nonce", (), 0, ())
    proxy.inject("lose answer", 1, puts)

    with pytest.raises(StorageError):
        log.append(entry)
    log.append(entry)

    assert list(log.entries(0)) == [entry]


def test_a_server_without_conditional_create_is_refused(open_s3: _Opener, proxy: S3Proxy) -> None:
    """A server that does not know `If-None-Match` replaces the file; the self-test sees it, and says what to do."""
    store = open_s3()
    proxy.inject("strip condition", 2, puts)

    with pytest.raises(ConfigurationError, match=r"has no conditional create.*AWS S3"):
        check_conditional_create(store)
    assert [r.path for r in proxy.requests("DELETE")] == [r.path for r in proxy.requests("PUT")][:1]


def test_names_are_asked_for_by_name(open_s3: _Opener, proxy: S3Proxy) -> None:
    """Writing, creating, reading, looking for and deleting a file list nothing."""
    store = open_s3()
    store.write("f", [b"x"])
    store.create("g", b"x")
    store.read("f", 0, 1)
    assert store.exists("g")
    store.delete("f")

    assert [r for r in proxy.requests() if "list-type" in r.query or "prefix=" in r.query] == []


def test_many_writers_share_a_broken_wire(open_s3: _Opener, proxy: S3Proxy) -> None:
    """Threads that use one store do not get each other's answers, whatever happens to some of them."""
    store = open_s3()
    # Fewer in all than one writer has attempts, should it meet every one of them.
    for action, times in (("busy", 2), ("lose answer", 2), ("cut request", 1)):
        proxy.inject(action, times, puts)  # type: ignore[arg-type]

    with ThreadPoolExecutor(4) as pool:
        sizes = list(pool.map(lambda i: store.write(f"d/{i}", [b"%d" % i * 1000]), range(12)))

    assert sizes == [1000 if i < 10 else 2000 for i in range(12)]
    assert [store.read(f"d/{i}") for i in range(12)] == [b"%d" % i * 1000 for i in range(12)]
