"""`AzureClient`: requests to Azure Blob Storage through its own library, with the credentials that adlfs finds."""

from __future__ import annotations

import asyncio
import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from adlfs import AzureBlobFileSystem
from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    ResourceExistsError,
    ResourceNotFoundError,
)
from azure.storage.blob import BlobBlock
from azure.storage.blob.aio import BlobPrefix

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system import FileInfo
from tidegate.storage.files.object_files import MARK, Page

_NO_CONTAINER = ("ContainerNotFound", "ContainerBeingDeleted", "FilesystemNotFound")
_IDENTITY = (
    "No key was given, so the identity of the machine or user is used: set AZURE_STORAGE_ACCOUNT_KEY, "
    "AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING, or give the machine an identity"
)
_ENVIRONMENT = {
    "account_name": "AZURE_STORAGE_ACCOUNT_NAME",
    "connection_string": "AZURE_STORAGE_CONNECTION_STRING",
}


@dataclass(slots=True)
class _Upload:
    """An upload of a blob in blocks.

    Each upload has separate block ids, because a block would replace a block of another writer with the same id.
    """

    bucket: str
    name: str
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    blocks: list[BlobBlock] = field(default_factory=list)


class AzureClient:
    """The requests that `ObjectFiles` needs. Credentials come from the options of adlfs, or from AZURE_ variables."""

    def __init__(self, options: dict[str, Any], url: str, host: str = "") -> None:
        """`host` is the host of the account, `account.dfs.core.windows.net`, if the URL names it."""
        account = host.partition(".")[0]
        more = {**options, "use_listings_cache": False, "asynchronous": False}
        if account:
            more.setdefault("account_name", account)
        if host and not host.endswith(".core.windows.net"):
            more.setdefault("account_host", host.replace(".dfs.", ".blob.", 1))
        # adlfs reads the same variables, but returns an earlier client for equal arguments.
        for name, variable in _ENVIRONMENT.items():
            if value := os.environ.get(variable):
                more.setdefault(name, value)
        try:
            self._fs = AzureBlobFileSystem(**more)
        except ValueError as error:
            raise ConfigurationError(
                f"storage at {url}: no Azure account ({str(error).rstrip('!')}). Set AZURE_STORAGE_CONNECTION_STRING, "
                "or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or write "
                "abfs://container@account.dfs.core.windows.net/prefix"
            ) from error
        used = self._fs.service_client.account_name
        if account and used and used != account:
            raise ConfigurationError(
                f"storage at {url}: the URL names the account {account!r}, and the credentials are for {used!r}. "
                "Change one of them"
            )
        self.advice = _IDENTITY if self._fs.credential is not None and options.get("credential") is None else ""
        self.loop: asyncio.AbstractEventLoop = self._fs.loop
        given = [host, repr(options), *(os.environ.get(name, "") for name in _ENVIRONMENT.values())]
        self.server = " ".join(["abfs", *given])

    async def put(self, bucket: str, name: str, data: bytes, mark: str | None) -> None:
        metadata = None if mark is None else {MARK: mark}
        with _translated():
            async with self._blob(bucket, name) as blob:
                await blob.upload_blob(data, overwrite=mark is None, metadata=metadata)

    async def begin(self, bucket: str, name: str) -> _Upload:
        return _Upload(bucket, name)

    async def add(self, upload: _Upload, data: bytearray, *, last: bool) -> None:
        block = BlobBlock(f"{upload.mark}-{len(upload.blocks):06d}")
        with _translated():
            async with self._blob(upload.bucket, upload.name) as blob:
                await blob.stage_block(block.id, bytes(data))
                upload.blocks.append(block)
                if last:
                    await blob.commit_block_list(upload.blocks)

    async def give_up(self, upload: _Upload) -> None:
        """Does nothing: Azure deletes blocks that belong to no blob after a week."""

    async def get(self, bucket: str, name: str, offset: int, length: int | None) -> tuple[bytes, FileInfo]:
        try:
            with _translated():
                async with self._blob(bucket, name) as blob:
                    stream = await blob.download_blob(offset=offset or (None if length is None else 0), length=length)
                    data = await stream.readall()
                    found = stream.properties
                    # The range as "bytes 1-3/5"; `size` is the length of the range.
                    size_bytes = int(found.content_range.rpartition("/")[2]) if found.content_range else found.size
                    return data, replace(_info("", found), size_bytes=size_bytes)
        except _PastTheEndError:
            return b"", (await self.head(bucket, name))[0]

    async def head(self, bucket: str, name: str) -> tuple[FileInfo, str | None]:
        with _translated():
            async with self._blob(bucket, name) as blob:
                found = await blob.get_blob_properties()
        if _is_folder(found):
            raise FileNotFoundError(errno.ENOENT, "this name is a folder, not a file", name)
        return _info("", found), (found.metadata or {}).get(MARK)

    async def page(self, bucket: str, prefix: str, flat: bool, following: str | None) -> Page:
        with _translated():
            async with self._fs.service_client.get_container_client(bucket) as container:
                listed = container.list_blobs if flat else container.walk_blobs
                pages = listed(name_starts_with=prefix or None, include=["metadata"]).by_page(following)
                files: list[FileInfo] = []
                folders: list[str] = []
                async for item in await anext(pages):
                    if isinstance(item, BlobPrefix):
                        folders.append(item.name)
                    elif not _is_folder(item):
                        files.append(_info(item.name, item))
        return Page(tuple(files), tuple(folders), pages.continuation_token or None)

    async def delete(self, bucket: str, name: str) -> None:
        with _translated():
            async with self._blob(bucket, name) as blob:
                await blob.delete_blob()

    def _blob(self, bucket: str, name: str) -> Any:
        return self._fs.service_client.get_blob_client(container=bucket, blob=name)


def _info(path: str, found: Any) -> FileInfo:
    return FileInfo(path, found.size, int(found.last_modified.timestamp()) * 1000, (found.etag or "").strip('"'))


def _is_folder(found: Any) -> bool:
    """Returns whether a blob represents a folder. Accounts with a hierarchical namespace have such blobs."""
    return bool((found.metadata or {}).get("hdi_isfolder") == "true")


class _PastTheEndError(OSError):
    """Raised if a byte range begins after the end of the object."""


@contextmanager
def _translated() -> Iterator[None]:
    """Returns a context that converts errors of Azure's library to OSError."""
    try:
        yield
    except ResourceExistsError as error:
        raise FileExistsError(errno.EEXIST, str(error)) from error
    except ResourceNotFoundError as error:
        # The attribute is set from the answer, where it has one.
        reason = getattr(error, "error_code", None)
        if reason in _NO_CONTAINER:
            raise OSError(errno.EIO, f"the container does not exist ({reason}): create it") from error
        raise FileNotFoundError(errno.ENOENT, str(error)) from error
    except HttpResponseError as error:
        if error.status_code == 416:
            raise _PastTheEndError(errno.EINVAL, "the requested range begins after the end of the blob") from error
        # The text of a failed identity has a line for each kind of credentials that was tried.
        message = str(error.message).partition("\n")[0]
        text = f"HTTP {error.status_code}: {message}" if error.status_code else message
        if error.status_code in (401, 403) or isinstance(error, ClientAuthenticationError):
            raise PermissionError(errno.EACCES, text) from error
        raise OSError(errno.EIO, text) from error
    except AzureError as error:
        raise OSError(errno.EIO, f"the request to Azure failed with {type(error).__name__}: {error}") from error
