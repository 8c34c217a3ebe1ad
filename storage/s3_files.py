"""S3 through s3fs, with its traps closed.

Rules kept here:

- No call waits for ever: connect and read timeouts, few retries with back-off, and a bound around each whole
  call. The `Expect: 100-continue` handler is removed, because botocore waits for the answer to it without any
  timeout.
- A conditional create is tried once. A retry of a create that did arrive would find its own file and report a
  loss; only answers that say "not applied, try again" (409, 503) are tried again, and they are bounded too.
- A lost create shows as FileExistsError or as a bare EINVAL, depending on the server: both are told by status
  412.
- An upload in parts becomes visible when it is completed, and is aborted otherwise.
- The region comes from the environment: `client_kwargs={"region_name": …}` would be ignored by parts of the
  stack.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import chain
from typing import Any, TypeVar

from aiohttp import ClientError as HttpError
from botocore.exceptions import BotoCoreError, ClientError
from botocore.handlers import add_expect_header
from fsspec.asyn import sync
from fsspec.exceptions import FSTimeoutError
from s3fs import S3FileSystem

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.store import Buffer

T = TypeVar("T")

PART_BYTES = 16 * 1024 * 1024
CREATE_TRIES_MAX = 5
_NOT_APPLIED_STATUS = (409, 503)
_FORBIDDEN_REGION = (
    "give the S3 region by the environment variable AWS_DEFAULT_REGION, not by client_kwargs={'region_name': …}"
)


class _S3FileSystem(S3FileSystem):  # type: ignore[misc]
    """s3fs whose client, also one made anew after a closed session, never waits for `100 Continue`."""

    _without_expect: object = None

    async def set_session(self, refresh: bool = False, kwargs: dict[str, Any] | None = None) -> Any:
        client = await super().set_session(refresh, kwargs or {})
        # _s3 rather than the return value: s3fs calls this before each request and returns either.
        if self._s3 is not None and self._s3 is not self._without_expect:
            self._s3.meta.events.unregister("before-call.s3", add_expect_header)
            self._without_expect = self._s3
        return client


class S3Files:
    """Objects by `bucket/key`. Credentials, endpoint and region come from the options or the environment."""

    def __init__(self, options: dict[str, Any], timeout_ms: int) -> None:
        """`options` are s3fs's (`key`, `secret`, …); `timeout_ms` bounds each request, retries included."""
        options = dict(options)
        if "region_name" in (options.get("client_kwargs") or {}):
            raise ConfigurationError(_FORBIDDEN_REGION)
        self._timeout_s = timeout_ms / 1000
        config = {"connect_timeout": self._timeout_s / 4, "read_timeout": self._timeout_s / 3}
        config.update(options.pop("config_kwargs", {}))
        options.pop("asynchronous", None)
        options["use_listings_cache"] = False
        self._retrying = _S3FileSystem(
            config_kwargs=config | {"retries": {"mode": "standard", "total_max_attempts": 3}}, **options
        )
        self._once = _S3FileSystem(config_kwargs=config | {"retries": {"total_max_attempts": 1}}, **options)
        # s3fs has a retry loop of its own around botocore's.
        self._retrying.retries = 2
        self._once.retries = 1

    def write(self, key: str, chunks: Iterable[Buffer]) -> int:
        where = _address(key)
        parts = _parts(chunks)
        first, second = next(parts, b""), next(parts, None)
        if second is None:
            self._call("put_object", Body=first, **where)
            return len(first)
        return self._upload(where, chain((first, second), parts))

    def create(self, key: str, data: Buffer) -> bool:
        body = bytes(data)
        for attempt in range(CREATE_TRIES_MAX):
            try:
                self._bounded(
                    self._once,
                    lambda: self._once._call_s3("put_object", Body=body, IfNoneMatch="*", **_address(key)),
                )
                return True
            except OSError as error:
                if _is_lost_create(error):
                    return False
                if _status(error) not in _NOT_APPLIED_STATUS or attempt + 1 == CREATE_TRIES_MAX:
                    raise
                time.sleep(0.05 * 2**attempt)
        raise AssertionError("unreachable")

    def read(self, key: str, offset: int, length: int | None) -> bytes:
        where = _address(key)
        if length == 0:
            self._call("head_object", **where)
            return b""
        if offset or length is not None:
            where["Range"] = f"bytes={offset}-{'' if length is None else offset + length - 1}"

        async def get() -> bytes:
            response = await self._retrying._call_s3("get_object", **where)
            async with response["Body"] as body:
                data = await body.read()
            return bytes(data)

        try:
            return self._bounded(self._retrying, get)
        except OSError as error:
            if _status(error) == 416:
                return b""
            raise

    def exists(self, key: str) -> bool:
        try:
            self._call("head_object", **_address(key))
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
        self._call("delete_object", **_address(key))

    def delete_tree(self, key: str) -> None:
        bucket = _address(key)["Bucket"]
        for page in self._pages(key):
            objects = [{"Key": item["Key"]} for item in page.get("Contents", ())]
            if not objects:
                continue
            answer = self._call("delete_objects", Bucket=bucket, Delete={"Objects": objects, "Quiet": True})
            if answer.get("Errors"):
                failed = answer["Errors"][0]
                raise OSError(errno.EIO, f"cannot delete {failed.get('Key')}: {failed.get('Message')}")

    def delete_temporary(self, key: str) -> int:
        return 0

    def _upload(self, where: dict[str, Any], parts: Iterator[bytes]) -> int:
        upload = {"UploadId": self._call("create_multipart_upload", **where)["UploadId"], **where}
        done: list[dict[str, object]] = []
        size_bytes = 0
        try:
            for number, part in enumerate(parts, start=1):
                answer = self._call("upload_part", PartNumber=number, Body=part, **upload)
                done.append({"PartNumber": number, "ETag": answer["ETag"]})
                size_bytes += len(part)
            self._call("complete_multipart_upload", MultipartUpload={"Parts": done}, **upload)
        except BaseException:
            self._call("abort_multipart_upload", **upload)
            raise
        return size_bytes

    def _pages(self, key: str, **more: object) -> Iterator[dict[str, Any]]:
        query = {"Bucket": _address(key)["Bucket"], "Prefix": _folder_prefix(key), **more}
        while True:
            page: dict[str, Any] = self._call("list_objects_v2", **query)
            yield page
            following = page.get("NextContinuationToken")
            if not page.get("IsTruncated") or following in (None, query.get("ContinuationToken")):
                return
            query["ContinuationToken"] = following

    def _call(self, operation: str, **arguments: object) -> Any:
        return self._bounded(self._retrying, lambda: self._retrying._call_s3(operation, **arguments))

    def _bounded(self, fs: _S3FileSystem, request: Callable[[], Awaitable[T]]) -> T:
        try:
            result: T = sync(fs.loop, request, timeout=self._timeout_s)
            return result
        except FSTimeoutError as error:
            message = f"no answer within {self._timeout_s:g} s; is the endpoint reachable?"
            raise TimeoutError(errno.ETIMEDOUT, message) from error
        except (BotoCoreError, HttpError) as error:
            raise OSError(errno.EIO, str(error)) from error


def _address(key: str) -> dict[str, Any]:
    bucket, _, name = key.partition("/")
    return {"Bucket": bucket, "Key": name}


def _folder_prefix(key: str) -> str:
    name = key.partition("/")[2].rstrip("/")
    return f"{name}/" if name else ""


def _parts(chunks: Iterable[Buffer]) -> Iterator[bytes]:
    """Cut chunks into parts of PART_BYTES each, the last one smaller; a large chunk is not copied twice."""
    pending = bytearray()
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while len(pending) + len(view) > PART_BYTES:
            room = PART_BYTES - len(pending)
            pending += view[:room]
            view = view[room:]
            yield bytes(pending)
            pending = bytearray()
        pending += view
    if pending:
        yield bytes(pending)


def _status(error: BaseException) -> int | None:
    """HTTP status of the answer that an error of s3fs was made from, if there was an answer."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ClientError):
        cause = cause.__cause__
    if cause is None:
        return None
    status = cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return int(status) if status is not None else None


def _is_lost_create(error: OSError) -> bool:
    if isinstance(error, FileExistsError):
        return True
    # EINVAL alone also stands for a dozen kinds of bad request; only with a 412, or no answer to look at, it
    # is a loss.
    return error.errno == errno.EINVAL and _status(error) in (412, None)
