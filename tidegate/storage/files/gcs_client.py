"""`GcsClient`: requests to Google Cloud Storage's JSON API, through gcsfs, which brings credentials and retries.

gcsfs requests a listing with every create, and separates the parts of an upload by a fixed text, which data may
contain. So only its `_call`, which makes one request, is used.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote

from aiohttp import ClientError
from gcsfs.core import GCSFileSystem
from gcsfs.retry import HttpError
from google.auth.exceptions import GoogleAuthError
from requests.exceptions import RequestException

from tidegate.storage.files.file_system import FileInfo
from tidegate.storage.files.object_files import MARK, Page

_TYPE = "application/octet-stream"
_PAGE_ROWS = 1_000
_EMULATOR = "STORAGE_EMULATOR_HOST"
_NO_CREDENTIALS = (
    "No credentials of Google were found, so requests are anonymous: set GOOGLE_APPLICATION_CREDENTIALS, or run "
    "gcloud auth application-default login"
)


@dataclass(slots=True)
class _Upload:
    location: str
    offset: int = 0


class GcsClient:
    """The requests that `ObjectFiles` needs. Credentials come from the options of gcsfs, or from the environment."""

    def __init__(self, options: dict[str, Any]) -> None:
        more = {**options, "use_listings_cache": False, "asynchronous": False}
        with _translated():
            # This class and not `gcsfs.GCSFileSystem`, which requests the kind of a bucket by a second protocol.
            self._fs = GCSFileSystem(**more)
        self.loop: asyncio.AbstractEventLoop = self._fs.loop
        anonymous = getattr(self._fs.credentials, "credentials", None) is None
        self.advice = _NO_CREDENTIALS if anonymous and not os.environ.get(_EMULATOR) else ""
        self.server = f"gs {options!r} {os.environ.get(_EMULATOR, '')}"

    async def put(self, bucket: str, name: str, data: bytes, mark: str | None) -> None:
        described: dict[str, Any] = {"name": name, "contentType": _TYPE}
        condition = {}
        if mark is not None:
            described["metadata"] = {MARK: mark}
            condition = {"ifGenerationMatch": "0"}
        # A new random boundary, which the data cannot contain.
        boundary = uuid.uuid4().hex
        parts = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n".encode(),
            f"{json.dumps(described)}\r\n".encode(),
            f"--{boundary}\r\nContent-Type: {_TYPE}\r\n\r\n".encode(),
            data,
            f"\r\n--{boundary}--".encode(),
        )
        headers = {"Content-Type": f'multipart/related; boundary="{boundary}"'}
        with _translated(), _bucket_exists(bucket):
            await self._fs._call(
                "POST",
                self._uploads(bucket),
                uploadType="multipart",
                headers=headers,
                data=b"".join(parts),
                **condition,
            )

    async def begin(self, bucket: str, name: str) -> _Upload:
        headers = {"X-Upload-Content-Type": _TYPE}
        with _translated(), _bucket_exists(bucket):
            answer, _ = await self._fs._call(
                "POST", self._uploads(bucket), uploadType="resumable", headers=headers, json={"name": name}
            )
        return _Upload(answer["Location"])

    def _uploads(self, bucket: str) -> str:
        return f"{self._fs._location}/upload/storage/v1/b/{quote(bucket)}/o"

    async def add(self, upload: _Upload, data: bytearray, *, last: bool) -> None:
        end = upload.offset + len(data)
        left = memoryview(data)
        while True:
            place = f"bytes {upload.offset}-{end - 1}/{end if last else '*'}"
            headers = {"Content-Range": place, "Content-Type": _TYPE, "Content-Length": str(len(left))}
            with _translated():
                answer, _ = await self._fs._call("POST", upload.location, headers=headers, data=bytes(left))
            # The server may have stored less. Its answer to a last part that is complete has no range.
            stored = (
                int(answer["Range"].rpartition("-")[2]) + 1 if "Range" in answer else (end if last else upload.offset)
            )
            if stored >= end:
                upload.offset = end
                return
            if stored <= upload.offset:
                raise OSError(errno.EIO, f"the server has stored nothing of a part of {len(left)} bytes; try again")
            left = left[stored - upload.offset :]
            upload.offset = stored

    async def give_up(self, upload: _Upload) -> None:
        with _translated():
            await self._fs._call("DELETE", upload.location)

    async def get(self, bucket: str, name: str, offset: int, length: int | None) -> tuple[bytes, FileInfo]:
        url = f"{self._fs._location}/download/storage/v1/b/{quote(bucket)}/o/{quote(name, safe='')}?alt=media"
        headers = {}
        if offset or length is not None:
            headers["Range"] = f"bytes={offset}-{'' if length is None else offset + length - 1}"
        try:
            with _translated():
                answer, data = await self._fs._call("GET", url, headers=headers)
        except _PastTheEndError:
            return b"", (await self.head(bucket, name))[0]
        if encoding := answer.get("Content-Encoding"):
            raise OSError(
                errno.EIO, f"the object is stored with Content-Encoding {encoding}; store its bytes without an encoding"
            )
        size_bytes = int(answer["Content-Range"].rpartition("/")[2]) if "Content-Range" in answer else len(data)
        modified = parsedate_to_datetime(answer["Last-Modified"])
        return data, FileInfo("", size_bytes, _whole_seconds_ms(modified), answer.get("x-goog-generation", ""))

    async def head(self, bucket: str, name: str) -> tuple[FileInfo, str | None]:
        with _translated():
            found = await self._fs._call("GET", "b/{}/o/{}", bucket, name, json_out=True)
        return _info("", found), (found.get("metadata") or {}).get(MARK)

    async def page(self, bucket: str, prefix: str, flat: bool, following: str | None) -> Page:
        with _translated(), _bucket_exists(bucket):
            found = await self._fs._call(
                "GET",
                "b/{}/o",
                bucket,
                prefix=prefix or None,
                delimiter=None if flat else "/",
                pageToken=following,
                maxResults=_PAGE_ROWS,
                json_out=True,
            )
        files = tuple(_info(item["name"], item) for item in found.get("items", ()))
        return Page(files, tuple(found.get("prefixes", ())), found.get("nextPageToken") or None)

    async def delete(self, bucket: str, name: str) -> None:
        with _translated():
            await self._fs._call("DELETE", "b/{}/o/{}", bucket, name)


def _info(path: str, item: dict[str, Any]) -> FileInfo:
    modified = datetime.fromisoformat(item["updated"])
    return FileInfo(path, int(item.get("size", 0)), _whole_seconds_ms(modified), str(item.get("generation", "")))


def _whole_seconds_ms(at: datetime) -> int:
    """Returns when an object was written, in ms since the epoch, cut to whole seconds.

    Answers that contain the object's bytes only have whole seconds.
    """
    return int(at.timestamp()) * 1000


class _PastTheEndError(OSError):
    """Raised if a byte range begins after the end of the object."""


@contextmanager
def _bucket_exists(bucket: str) -> Iterator[None]:
    """Returns a context that names the bucket in the error of a request which can only fail because the bucket is
    missing.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise OSError(errno.EIO, f"the bucket {bucket!r} does not exist: create it") from error


@contextmanager
def _translated() -> Iterator[None]:
    """Returns a context that converts errors of gcsfs to OSError."""
    try:
        yield
    except HttpError as error:
        code = int(error.code) if error.code is not None else None
        if code == 416:
            raise _PastTheEndError(
                errno.EINVAL, f"the requested range begins after the end of the object: {error.message}"
            ) from error
        if code == 412:
            raise FileExistsError(errno.EEXIST, f"an object of this name exists already: {error.message}") from error
        kind = PermissionError if code in (401, 403) else OSError
        raise kind(errno.EACCES if code in (401, 403) else errno.EIO, f"HTTP {code}: {error.message}") from error
    except (GoogleAuthError, RequestException, ClientError, ValueError, json.JSONDecodeError) as error:
        raise OSError(
            errno.EIO, f"the request to Google Cloud Storage failed with {type(error).__name__}: {error}"
        ) from error
    except OSError as error:
        if str(error).startswith("Forbidden"):
            raise PermissionError(errno.EACCES, str(error)) from error
        raise
