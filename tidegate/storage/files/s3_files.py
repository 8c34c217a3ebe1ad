"""`S3Files`: files on S3, objects by `bucket/key`. `S3Requests` makes, bounds and repeats the requests, through s3fs.

Rules of files:

- A conditional create is tried once. A retry of a create that did arrive would find its own file and report a loss.
  Only the answers "not applied, try again" (409, 503) are followed by another attempt, a bounded number of times.
- A lost create arrives as FileExistsError or as a bare EINVAL, depending on the server. Status 412 identifies both.
- A large file is uploaded in parts, several at a time; at most `PARTS_IN_MEMORY_MAX` of them are in memory. It becomes
  visible when the upload is completed, and the upload is aborted otherwise. The upload has a mark, which shows
  whether it was completed when the answer to its completion was lost.
- A whole write has a time limit of its own, however many parts it has.
- A file is looked up by its name. Only `list` and `walk` list.

Rules of requests:

- Every request has connect and read timeouts, and a limit around all attempts together. A request that timed out is
  cancelled, and does not continue in the background. The `Expect: 100-continue` handler is removed, because botocore
  waits for the answer to it without any timeout.
- There is one loop of attempts, with a limit and growing pauses, and it covers the body of an answer too. The loops of
  botocore, s3fs and aiohttp are switched off: they would multiply with it, none of them reads bodies, and aiohttp
  repeats every put whose connection broke, also a put that must not be repeated.
- Only transient errors are tried again: a server that is busy or broken, a connection that broke. Refusals are not.
- The region comes from the environment: `client_kwargs={"region_name": …}` would be ignored by parts of the stack.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import chain
from typing import Any, TypeVar

from aiobotocore.httpsession import AIOHTTPSession
from aiohttp import ClientError as HttpError
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError
from botocore.exceptions import ConnectionError as NoConnectionError
from botocore.handlers import add_expect_header
from botocore.parsers import ResponseParserError
from s3fs import S3FileSystem

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system import OF_THIS_PROCESS, FileInfo
from tidegate.storage.files.store import Buffer

PART_BYTES = 16 * 1024 * 1024
PARTS_IN_MEMORY_MAX = 4
"""Limit of parts of one upload in memory: one that is being filled, and several that are being uploaded."""
CREATE_TRIES_MAX = 5
_NOT_APPLIED_STATUS = (409, 503)
_DELETED_AT_ONCE_MAX = 1_000
_UPLOAD_MARK = "tidegate-upload"

_logger = logging.getLogger(__name__)


class S3Files:
    """Files on S3, by `bucket/key`. Credentials, endpoint and region come from the options or the environment."""

    repeats_requests = True

    def __init__(self, options: dict[str, Any], timeout_ms: int, write_timeout_ms: int) -> None:
        """`options` are the options of s3fs (`key`, `secret`, …).

        `timeout_ms` limits each request including its retries, in ms. `write_timeout_ms` limits a whole write.
        """
        self._requests = S3Requests(options, timeout_ms)
        self._server = " ".join(
            [repr(options), *(os.environ.get(name, "") for name in (*ENDPOINT_VARIABLES, "AWS_PROFILE"))]
        )
        self._write_timeout_s = write_timeout_ms / 1000

    def place(self, key: str) -> str:
        return f"{_address(key)['Bucket']} {self._server}"

    def write(self, key: str, chunks: Iterable[Buffer]) -> int:
        deadline_s = time.monotonic() + self._write_timeout_s
        where = _address(key)
        parts = _parts(chunks)
        first, second = next(parts, bytearray()), next(parts, None)
        if second is None:
            self._requests.call("put_object", Body=first, **where)
            return len(first)
        whole = chain((first, second), parts)
        # Release the first parts while later parts are uploaded.
        del first, second
        return self._upload(where, whole, deadline_s)

    def create(self, key: str, data: Buffer) -> bool:
        try:
            self._requests.call_decisive(
                "put_object", CREATE_TRIES_MAX, _NOT_APPLIED_STATUS, Body=bytes(data), IfNoneMatch="*", **_address(key)
            )
        except OSError as error:
            if _is_lost_create(error):
                return False
            raise
        return True

    def read(self, key: str, offset: int, length: int | None) -> bytes:
        where = _address(key)
        if length == 0:
            self._requests.call("head_object", **where)
            return b""
        if offset or length is not None:
            where["Range"] = f"bytes={offset}-{'' if length is None else offset + length - 1}"
        try:
            return self._requests.get(**where)[0]
        except OSError as error:
            if status_of(error) == 416:
                return b""
            raise

    def read_with_info(self, key: str, offset: int, length: int) -> tuple[bytes, FileInfo]:
        try:
            data, answer = self._requests.get(Range=f"bytes={offset}-{offset + length - 1}", **_address(key))
        except OSError as error:
            if status_of(error) == 416:
                return b"", self.info(key)
            raise
        return data, _info(key, int(answer["ContentRange"].rpartition("/")[2]), answer)

    def exists(self, key: str) -> bool:
        try:
            self._requests.call("head_object", **_address(key))
        except FileNotFoundError:
            return False
        return True

    def list(self, key: str) -> list[str]:
        prefix = _folder_prefix(key)
        names: list[str] = []
        for page in self._pages(key, Delimiter="/"):
            names += [item["Key"][len(prefix) :] for item in page.get("Contents", ())]
            names += [item["Prefix"][len(prefix) :].rstrip("/") for item in page.get("CommonPrefixes", ())]
        # Some tools leave an object named like the folder itself.
        return [name for name in names if name]

    def delete(self, key: str) -> None:
        self._requests.call("delete_object", **_address(key))

    def delete_all(self, keys: Sequence[str]) -> None:
        addresses = [_address(key) for key in keys]
        for begin in range(0, len(addresses), _DELETED_AT_ONCE_MAX):
            some = addresses[begin : begin + _DELETED_AT_ONCE_MAX]
            self._delete_objects(some[0]["Bucket"], [address["Key"] for address in some])

    def delete_tree(self, key: str) -> None:
        bucket = _address(key)["Bucket"]
        for page in self._pages(key):
            if names := [item["Key"] for item in page.get("Contents", ())]:
                self._delete_objects(bucket, names)

    def _delete_objects(self, bucket: str, names: Sequence[str]) -> None:
        objects = [{"Key": name} for name in names]
        answer = self._requests.call("delete_objects", Bucket=bucket, Delete={"Objects": objects, "Quiet": True})
        if answer.get("Errors"):
            failed = answer["Errors"][0]
            why = f"{failed.get('Code')}: {failed.get('Message')}"
            raise OSError(
                errno.EIO, f"cannot delete {failed.get('Key')}: {why}; check that the credentials allow s3:DeleteObject"
            )

    def delete_temporary(self, key: str) -> int:
        count = 0
        query = {"Bucket": _address(key)["Bucket"], "Prefix": _folder_prefix(key)}
        while True:
            page = self._requests.call("list_multipart_uploads", **query)
            for upload in page.get("Uploads", ()):
                where = {"Bucket": query["Bucket"], "Key": upload["Key"]}
                self._requests.call("abort_multipart_upload", UploadId=upload["UploadId"], **where)
                count += 1
            following = {"KeyMarker": page.get("NextKeyMarker"), "UploadIdMarker": page.get("NextUploadIdMarker")}
            if not page.get("IsTruncated") or not all(following.values()):
                return count
            query.update(following)

    def walk(self, key: str, *, follow_links: bool = False) -> Iterator[FileInfo]:
        prefix = _folder_prefix(key)
        for page in self._pages(key):
            for item in page.get("Contents", ()):
                # Some tools leave an object named like the folder itself.
                if name := item["Key"][len(prefix) :]:
                    yield FileInfo(name, item["Size"], _whole_seconds_ms(item))

    def info(self, key: str) -> FileInfo:
        answer = self._requests.call("head_object", **_address(key))
        return _info(key, answer["ContentLength"], answer)

    def _upload(self, where: dict[str, Any], parts: Iterator[bytearray], deadline_s: float) -> int:
        mark = uuid.uuid4().hex
        answer = self._requests.call("create_multipart_upload", Metadata={_UPLOAD_MARK: mark}, **where)
        upload = {"UploadId": answer["UploadId"], **where}
        on_their_way: dict[Future[Any], int] = {}
        tags: dict[int, str] = {}
        size_bytes = 0
        try:
            for number, part in enumerate(parts, start=1):
                self._collect(on_their_way, tags, PARTS_IN_MEMORY_MAX - 2, deadline_s)
                on_their_way[self._requests.start("upload_part", PartNumber=number, Body=part, **upload)] = number
                size_bytes += len(part)
                del part
            self._collect(on_their_way, tags, 0, deadline_s)
            self._complete(upload, [{"PartNumber": n, "ETag": tags[n]} for n in sorted(tags)], where, mark)
        except BaseException:
            for request in on_their_way:
                request.cancel()
            self._abort(upload)
            raise
        return size_bytes

    def _collect(
        self, on_their_way: dict[Future[Any], int], tags: dict[int, str], left_max: int, deadline_s: float
    ) -> None:
        """Waits until at most `left_max` parts are being uploaded, and stores the ETags of finished ones in `tags`.

        Raises TimeoutError at `deadline_s` (monotonic seconds).
        """
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    f"the write did not end within {self._write_timeout_s:g} s; check the network to the store",
                )
            if len(on_their_way) <= left_max:
                return
            for request in wait(on_their_way, left_s, FIRST_COMPLETED).done:
                tags[on_their_way.pop(request)] = self._requests.wait_for(request)["ETag"]

    def _complete(
        self, upload: dict[str, Any], parts: Sequence[dict[str, object]], where: dict[str, Any], mark: str
    ) -> None:
        try:
            self._requests.call("complete_multipart_upload", MultipartUpload={"Parts": parts}, **upload)
        except OSError as error:
            # It may have happened, unanswered: another attempt then finds no such upload.
            try:
                there = self._requests.call("head_object", **where).get("Metadata", {}).get(_UPLOAD_MARK)
            except OSError:
                raise error from None
            if there != mark:
                raise

    def _abort(self, upload: dict[str, Any]) -> None:
        try:
            self._requests.call("abort_multipart_upload", **upload)
        except OSError as error:
            _logger.warning(
                "Could not abort the upload of s3://%s/%s. Its parts take up space until it is aborted: %s",
                upload["Bucket"],
                upload["Key"],
                error,
            )

    def _pages(self, key: str, **more: object) -> Iterator[dict[str, Any]]:
        query = {"Bucket": _address(key)["Bucket"], "Prefix": _folder_prefix(key), **more}
        while True:
            page: dict[str, Any] = self._requests.call("list_objects_v2", **query)
            yield page
            following = page.get("NextContinuationToken")
            if not page.get("IsTruncated") or following in (None, query.get("ContinuationToken")):
                return
            query["ContinuationToken"] = following


def _address(key: str) -> dict[str, Any]:
    bucket, _, name = key.partition("/")
    return {"Bucket": bucket, "Key": name}


def _info(key: str, size_bytes: int, answer: dict[str, Any]) -> FileInfo:
    tag = answer.get("ETag", "").removeprefix("W/").strip('"')
    return FileInfo(key, size_bytes, _whole_seconds_ms(answer), tag)


def _whole_seconds_ms(answer: dict[str, Any]) -> int:
    """Returns the modification time of an object in ms since the epoch, cut to whole seconds: some servers return
    milliseconds only in listings.
    """
    return int(answer["LastModified"].timestamp()) * 1000


def _folder_prefix(key: str) -> str:
    name = key.partition("/")[2].rstrip("/")
    return f"{name}/" if name else ""


def _parts(chunks: Iterable[Buffer]) -> Iterator[bytearray]:
    """Joins and cuts chunks into parts of PART_BYTES each, the last one smaller. The caller owns each part."""
    pending = bytearray()
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while len(pending) + len(view) > PART_BYTES:
            room = PART_BYTES - len(pending)
            pending += view[:room]
            view = view[room:]
            full, pending = pending, bytearray()
            yield full
            del full
        pending += view
    if pending:
        yield pending


def _is_lost_create(error: OSError) -> bool:
    if isinstance(error, FileExistsError):
        return True
    # EINVAL also covers a dozen kinds of bad request. It is a lost create only with status 412, or without an
    # answer.
    return error.errno == errno.EINVAL and status_of(error) in (412, None)


T = TypeVar("T")

TRIES_MAX = 8
PAUSE_S_FIRST = 0.1
PAUSE_S_MAX = 5.0
"""Longest pause between attempts, in seconds. All pauses take 5.6 to 11.3 s in total, long enough for a server to
restart.
"""
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_LOOP_GRACE_S = 5.0
"""Seconds that a caller waits beyond the time limit of a request, until the event loop has noticed the limit."""
_BUSY_STATUS = (408, 429, 500, 502, 503, 504)
_BUSY_CODES = ("RequestTimeout", "SlowDown", "InternalError")
_BROKEN_CONNECTION = (
    HTTPClientError,
    NoConnectionError,
    IncompleteReadError,
    ResponseParserError,
    HttpError,
    ConnectionError,
    TimeoutError,
)
_FORBIDDEN_REGION = (
    "give the S3 region by the environment variable AWS_DEFAULT_REGION, not by client_kwargs={'region_name': …}"
)


class _HttpSession(AIOHTTPSession):  # type: ignore[misc]
    """HTTP connections of a client, without aiohttp's own retry after a broken connection."""

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        session._retry_connection = False
        return session


class _S3FileSystem(S3FileSystem):  # type: ignore[misc]
    """An s3fs file system that never waits for `100 Continue`, also after its client was created again."""

    _without_expect: object = None

    async def set_session(self, refresh: bool = False, kwargs: dict[str, Any] | None = None) -> Any:
        client = await super().set_session(refresh, kwargs or {})
        # Uses `_s3` and not the return value: s3fs calls this before each request, and does not always return it.
        if self._s3 is not None and self._s3 is not self._without_expect:
            self._s3.meta.events.unregister("before-call.s3", add_expect_header)
            self._without_expect = self._s3
        return client


class S3Requests:
    """Makes the requests of one S3 client, with retries and time limits.

    Thread-safe. A failure raises OSError: errors of s3fs, TimeoutError, or EIO for other errors.
    """

    def __init__(self, options: dict[str, Any], timeout_ms: int) -> None:
        """`options` are the options of s3fs. `timeout_ms` limits all attempts of a request together."""
        options = dict(options)
        _check_endpoint(options)
        if "region_name" in (options.get("client_kwargs") or {}):
            raise ConfigurationError(_FORBIDDEN_REGION)
        self._timeout_s = timeout_ms / 1000
        config: dict[str, Any] = {"connect_timeout": self._timeout_s / 4, "read_timeout": self._timeout_s / 3}
        config.update(options.pop("config_kwargs", {}))
        config |= {"retries": {"total_max_attempts": 1}, "http_session_cls": _HttpSession}
        options.pop("asynchronous", None)
        options["use_listings_cache"] = False
        self._fs = _S3FileSystem(config_kwargs=config, **options)
        self._fs.retries = 1

    def call(self, operation: str, **arguments: object) -> Any:
        """Makes one request, e.g. `put_object`, with retries, and returns the answer."""
        return self.wait_for(self.start(operation, **arguments))

    def call_decisive(self, operation: str, tries_max: int, not_applied: tuple[int, ...], **arguments: object) -> Any:
        """Makes a request that must not be repeated once it may have been applied, and returns the answer.

        The request is tried again, up to `tries_max` times, only after an HTTP status in `not_applied`, which shows
        that it was not applied.
        """
        return self.wait_for(
            self._start(
                lambda: self._fs._call_s3(operation, **arguments),
                tries_max,
                lambda error: status_of(error) in not_applied,
            )
        )

    def start(self, operation: str, **arguments: object) -> Future[Any]:
        """Starts a request in the background, and returns its future."""
        return self._start(lambda: self._fs._call_s3(operation, **arguments), TRIES_MAX, _can_pass)

    def get(self, **arguments: object) -> tuple[bytes, dict[str, Any]]:
        """Returns the body of an object (or of a byte range) and the answer's headers.

        A body that breaks off is requested again.
        """

        async def body() -> tuple[bytes, dict[str, Any]]:
            answer = await self._fs._call_s3("get_object", **arguments)
            async with answer["Body"] as stream:
                return bytes(await stream.read()), answer

        return self.wait_for(self._start(body, TRIES_MAX, _can_pass))

    def wait_for(self, request: Future[T]) -> T:
        """Waits for a started request and returns its result.

        Raises TimeoutError after the time limit, and cancels the request.
        """
        try:
            return request.result(self._timeout_s + _LOOP_GRACE_S)
        except TimeoutError as error:
            if request.done():
                raise
            raise self._no_answer() from error
        finally:
            # The caller may have been interrupted.
            request.cancel()

    def _start(
        self, request: Callable[[], Awaitable[T]], tries_max: int, again: Callable[[BaseException], bool]
    ) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(self._attempts(request, tries_max, again), self._fs.loop)

    async def _attempts(
        self, request: Callable[[], Awaitable[T]], tries_max: int, again: Callable[[BaseException], bool]
    ) -> T:
        last: Exception | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                for attempt in range(tries_max):
                    OF_THIS_PROCESS.s3_request(again=attempt > 0)
                    try:
                        return await request()
                    except (OSError, BotoCoreError, HttpError) as error:
                        last = error
                        if not again(error):
                            break
                    if attempt + 1 < tries_max:
                        # Many tasks meet the same busy server at the same time. They retry at different times.
                        pause_s = min(PAUSE_S_FIRST * 2**attempt, PAUSE_S_MAX)
                        await asyncio.sleep(pause_s * (0.5 + random.random() / 2))
        except TimeoutError as error:
            raise self._no_answer(last) from (last or error)
        assert last is not None
        raise _named(last) from last

    def _no_answer(self, last: Exception | None = None) -> TimeoutError:
        why = "is the endpoint reachable?" if last is None else f"the last attempt: {_named(last)}"
        return TimeoutError(errno.ETIMEDOUT, f"the S3 server gave no answer within {self._timeout_s:g} s; {why}")


def status_of(error: BaseException) -> int | None:
    """Returns the HTTP status of the S3 answer that caused an error of s3fs, or None without an answer."""
    cause = _client_error(error)
    status = None if cause is None else cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return int(status) if status is not None else None


def _named(error: Exception) -> OSError:
    """Returns an OSError whose message has the S3 error code and the HTTP status, because the original message may be
    empty.
    """
    cause = _client_error(error)
    if cause is None:
        return error if isinstance(error, OSError) else OSError(errno.EIO, str(error))
    answer = cause.response.get("Error", {})
    code, message = answer.get("Code") or "no code", answer.get("Message")
    text = f"{code} (HTTP {status_of(error)})" + (f": {message}" if message else "")
    kind = type(error) if isinstance(error, OSError) else OSError
    return kind(getattr(error, "errno", None) or errno.EIO, text)


def _check_endpoint(options: dict[str, Any]) -> None:
    """Raises ConfigurationError for an S3 endpoint without http:// or https://. botocore's error does not name the
    option.
    """
    given = {
        "the option endpoint_url": options.get("endpoint_url"),
        "client_kwargs={'endpoint_url': …}": (options.get("client_kwargs") or {}).get("endpoint_url"),
        **{f"the environment variable {name}": os.environ.get(name) for name in ENDPOINT_VARIABLES},
    }
    for where, endpoint in given.items():
        if endpoint and not str(endpoint).startswith(("http://", "https://")):
            raise ConfigurationError(
                f"the S3 endpoint {str(endpoint)!r} in {where} has no scheme: write http://{endpoint} or https://{endpoint}"
            )


def _can_pass(error: BaseException) -> bool:
    cause = _client_error(error)
    if cause is None:
        return isinstance(error, _BROKEN_CONNECTION)
    return status_of(error) in _BUSY_STATUS or cause.response.get("Error", {}).get("Code") in _BUSY_CODES


def _client_error(error: BaseException) -> ClientError | None:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ClientError):
        cause = cause.__cause__
    return cause
