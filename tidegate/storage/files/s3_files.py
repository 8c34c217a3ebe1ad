"""`S3Files`: files on S3, objects by `bucket/key`. `s3_requests.py` makes, bounds and repeats the requests.

Rules kept here:

- A conditional create is tried once. A retry of a create that did arrive would find its own file and report a
  loss; only answers that say "not applied, try again" (409, 503) are tried again, and they are bounded too.
- A lost create shows as FileExistsError or as a bare EINVAL, depending on the server: both are told by status
  412.
- A large file is uploaded in parts, several at a time; at most `PARTS_IN_MEMORY_MAX` of them are in memory. It becomes
  visible when the upload is completed, and the upload is aborted otherwise. The upload carries a mark, so that one
  whose completion was not answered is told from one that did not happen.
- A whole write has a bound of its own, however many parts it has.
- A name is asked for by name. Listings are for those who ask for a listing.
"""

from __future__ import annotations

import errno
import logging
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import chain
from typing import Any

from tidegate.storage.files.file_system import FileInfo
from tidegate.storage.files.s3_requests import ENDPOINT_VARIABLES, S3Requests, status_of
from tidegate.storage.files.store import Buffer

PART_BYTES = 16 * 1024 * 1024
PARTS_IN_MEMORY_MAX = 4
"""One that is being filled, the others on their way."""
CREATE_TRIES_MAX = 5
_NOT_APPLIED_STATUS = (409, 503)
_DELETED_AT_ONCE_MAX = 1_000
_UPLOAD_MARK = "tidegate-upload"

_logger = logging.getLogger(__name__)


class S3Files:
    """Objects by `bucket/key`. Credentials, endpoint and region come from the options or the environment."""

    repeats_requests = True

    def __init__(self, options: dict[str, Any], timeout_ms: int, write_timeout_ms: int) -> None:
        """`options` are s3fs's (`key`, `secret`, …).

        `timeout_ms` bounds each request, retries included; `write_timeout_ms` bounds a whole write.
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
        # Nothing here keeps the first parts alive while the others are uploaded.
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
            raise OSError(errno.EIO, f"cannot delete {failed.get('Key')}: {why}")

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
        """Wait until at most `left_max` parts are on their way; note the tags of those that have arrived."""
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(errno.ETIMEDOUT, f"the write was not over within {self._write_timeout_s:g} s")
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
                "Could not abort the upload of s3://%s/%s, whose parts take up space until somebody does: %s",
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
    """When an object was written: some servers have milliseconds in listings, and none has in answers by name."""
    return int(answer["LastModified"].timestamp()) * 1000


def _folder_prefix(key: str) -> str:
    name = key.partition("/")[2].rstrip("/")
    return f"{name}/" if name else ""


def _parts(chunks: Iterable[Buffer]) -> Iterator[bytearray]:
    """Cut chunks into parts of PART_BYTES each, the last one smaller; a part is the taker's alone."""
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
    # EINVAL alone also stands for a dozen kinds of bad request; only with a 412, or no answer to look at, it
    # is a loss.
    return error.errno == errno.EINVAL and status_of(error) in (412, None)
