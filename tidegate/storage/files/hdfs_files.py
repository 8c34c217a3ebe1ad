"""`HdfsFiles`: files on HDFS, by WebHDFS, Hadoop's HTTP interface. It needs no Java and no native library.

Rules:

- A file is written under a temporary name in its folder, and then renamed. The NameNode renames in one step, and either
  replaces the target or refuses to. So a file appears complete, and one of several creators wins.
- `hdfs://` is resolved by Hadoop's own settings (`HADOOP_CONF_DIR`), as its ports are of another protocol. `webhdfs://`
  names the HTTP address itself.
- With several NameNodes the next one is tried only if one refuses the connection, or answers that it is on standby.
- A request has time limits for connecting and for each wait for bytes, and a whole write has one of its own.
- No request is repeated here. `RetryingStore` repeats the operations that may be repeated.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

import requests
from requests.adapters import HTTPAdapter

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system import TEMPORARY_PREFIX, FileInfo
from tidegate.storage.files.store import Buffer

HTTP_PORT = 9870
"""Port of a NameNode's HTTP interface in Hadoop 3."""
_CONNECTIONS_MAX = 16
_READS_MAX = 5
"""Attempts to read a file that is replaced again and again meanwhile."""
_NEVER = "0.0.0.0"


@dataclass(frozen=True, slots=True)
class NameNodes:
    """The HTTP addresses of the NameNodes of one HDFS, as `http://host:port`."""

    addresses: tuple[str, ...]


class HdfsFiles:
    """Files by absolute path. The user is `HADOOP_USER_NAME`, or the user of the process."""

    repeats_requests = False

    def __init__(self, nodes: NameNodes, user: str, timeout_ms: int, write_timeout_ms: int) -> None:
        """Creates the object. `timeout_ms` limits each wait for an answer, in ms. `write_timeout_ms` limits a whole
        write.
        """
        self._addresses = nodes.addresses
        self._current = 0
        self._user = user
        self._timeout_s = (timeout_ms / 4000, timeout_ms / 1000)
        self._write_timeout_s = write_timeout_ms / 1000
        self._session = requests.Session()
        # Neither proxies nor passwords of the environment are for a cluster.
        self._session.trust_env = False
        self._session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(pool_connections=_CONNECTIONS_MAX, pool_maxsize=_CONNECTIONS_MAX))

    def place(self, key: str) -> str:
        return f"hdfs {' '.join(self._addresses)}"

    def write(self, key: str, chunks: Iterable[Buffer]) -> int:
        temporary, size_bytes = self._write_temporary(key, chunks)
        self._rename(temporary, key, "OVERWRITE")
        return size_bytes

    def create(self, key: str, data: Buffer) -> bool:
        temporary, _ = self._write_temporary(key, (data,))
        try:
            self._rename(temporary, key, "NONE")
        except FileExistsError:
            return False
        return True

    def read(self, key: str, offset: int, length: int | None) -> bytes:
        if length == 0:
            self.info(key)
            return b""
        span = {"offset": offset} | ({} if length is None else {"length": length})
        try:
            answer = self._name_node("GET", key, "OPEN", **span)
            with self._data_node("GET", answer.headers["Location"]) as found:
                return bytes(found.content)
        except _PastTheEndError:
            return b""

    def read_with_info(self, key: str, offset: int, length: int) -> tuple[bytes, FileInfo]:
        found = self.info(key)
        for _ in range(_READS_MAX):
            data = self.read(key, offset, length)
            before, found = found, self.info(key)
            if before == found:
                return data, found
        raise OSError(
            errno.EBUSY,
            f"the file was replaced {_READS_MAX} times while it was read; do not write to files while a job reads them",
        )

    def exists(self, key: str) -> bool:
        try:
            self.info(key)
        except FileNotFoundError:
            return False
        return True

    def list(self, key: str) -> list[str]:
        return [status["pathSuffix"] for status in self._listed(key)]

    def delete(self, key: str) -> None:
        try:
            self._name_node("DELETE", key, "DELETE", recursive="false")
        except (FileNotFoundError, _FolderNotEmptyError):
            return

    def delete_all(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.delete(key)

    def delete_tree(self, key: str) -> None:
        try:
            if self._status(key)["type"] == "DIRECTORY":
                self._name_node("DELETE", key, "DELETE", recursive="true")
        except FileNotFoundError:
            return

    def delete_temporary(self, key: str) -> int:
        count = 0
        for path, status in self._walked(key):
            if status["pathSuffix"].startswith(TEMPORARY_PREFIX):
                self.delete(path)
                count += 1
        return count

    def walk(self, key: str, *, follow_links: bool = False) -> Iterator[FileInfo]:
        below = len(key.rstrip("/")) + 1
        for path, status in self._walked(key):
            if not status["pathSuffix"].startswith(TEMPORARY_PREFIX):
                yield _info(path[below:], status)

    def info(self, key: str) -> FileInfo:
        status = self._status(key)
        if status["type"] != "FILE":
            raise FileNotFoundError(errno.ENOENT, "it is a folder", key)
        return _info(key, status)

    def _status(self, key: str) -> dict[str, Any]:
        found: dict[str, Any] = self._name_node("GET", key, "GETFILESTATUS").json()["FileStatus"]
        return found

    def _listed(self, key: str, temporary: bool = False) -> Iterator[dict[str, Any]]:
        """Yields the entries directly under a folder, in parts of a size that the NameNode limits. Yields nothing if
        the folder is missing.
        """
        after = ""
        while True:
            try:
                answer = self._name_node("GET", key, "LISTSTATUS_BATCH", startAfter=after)
            except FileNotFoundError:
                return
            listing = answer.json()["DirectoryListing"]
            statuses = listing["partialListing"]["FileStatuses"]["FileStatus"]
            for status in statuses:
                # A listing of a file has the file itself, without a name.
                if (name := status["pathSuffix"]) and (temporary or not name.startswith(TEMPORARY_PREFIX)):
                    yield status
            if not listing["remainingEntries"] or not statuses:
                return
            after = statuses[-1]["pathSuffix"]

    def _walked(self, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
        folders = [key.rstrip("/")]
        while folders:
            folder = folders.pop()
            for status in self._listed(folder or "/", temporary=True):
                path = f"{folder}/{status['pathSuffix']}"
                if status["type"] == "DIRECTORY":
                    folders.append(path)
                elif status["type"] == "FILE":
                    yield path, status

    def _write_temporary(self, key: str, chunks: Iterable[Buffer]) -> tuple[str, int]:
        """Writes a file in the folder of `key`. Returns its path and its size in bytes."""
        temporary = f"{key.rpartition('/')[0]}/{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        deadline_s = time.monotonic() + self._write_timeout_s
        size_bytes = 0

        def body() -> Iterator[bytes]:
            nonlocal size_bytes
            for chunk in chunks:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(
                        errno.ETIMEDOUT,
                        f"the write did not end within {self._write_timeout_s:g} s; check the network to HDFS",
                    )
                # An empty chunk would end the body.
                if data := bytes(chunk):
                    size_bytes += len(data)
                    yield data

        answer = self._name_node("PUT", temporary, "CREATE", overwrite="false")
        try:
            self._data_node("PUT", answer.headers["Location"], data=body()).close()
            written = self._status(temporary)["length"]
            if written != size_bytes:
                raise OSError(errno.EIO, f"HDFS has stored {written} of {size_bytes} bytes; write the file again")
        except BaseException as error:
            self._discard(temporary, error)
            raise
        return temporary, size_bytes

    def _rename(self, temporary: str, key: str, option: str) -> None:
        """Renames a temporary file to its final name, atomically. Raises FileExistsError with the option NONE if the
        name is taken.
        """
        try:
            self._name_node("PUT", temporary, "RENAME", destination=key, renameoptions=option)
        except OSError as error:
            self._discard(temporary, error)
            raise

    def _discard(self, temporary: str, why: BaseException) -> None:
        """Deletes a temporary file. `delete_temporary` deletes it later if this fails."""
        try:
            self.delete(temporary)
        except OSError as error:
            why.add_note(f"The unfinished file {temporary} could not be deleted: {error}")

    def _name_node(self, method: str, path: str, operation: str, **parameters: object) -> requests.Response:
        """Returns the answer of the active NameNode. Raises OSError."""
        given = {"op": operation, "user.name": self._user, **parameters}
        passed: OSError | None = None
        for _ in self._addresses:
            address = self._addresses[self._current % len(self._addresses)]
            try:
                return self._request(method, f"{address}/webhdfs/v1{quote(path)}", params=given)
            except (_StandbyError, _UnreachableError) as error:
                passed = error
                self._current += 1
        assert passed is not None
        raise passed

    def _data_node(self, method: str, url: str, **more: Any) -> requests.Response:
        headers = {"Content-Type": "application/octet-stream"} if method == "PUT" else {}
        return self._request(method, url, headers=headers, **more)

    def _request(self, method: str, url: str, **more: Any) -> requests.Response:
        try:
            answer = self._session.request(method, url, allow_redirects=False, timeout=self._timeout_s, **more)
        except requests.exceptions.ConnectTimeout as error:
            raise _UnreachableError(
                errno.ETIMEDOUT, f"the HDFS server {_address(url)} does not answer; check that it runs, and the address"
            ) from error
        except requests.exceptions.Timeout as error:
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"the HDFS server {_address(url)} did not answer within {self._timeout_s[1]:g} s; check its load and "
                "the network",
            ) from error
        except requests.exceptions.ConnectionError as error:
            # The causes are nested, and only the text has the class of the innermost one.
            refused = "NewConnectionError" in str(error) or "NameResolutionError" in str(error)
            kind = _UnreachableError if refused else OSError
            reason = getattr(error.args[0], "reason", error) if error.args else error
            raise kind(
                errno.EIO,
                f"cannot reach the HDFS server {_address(url)}: {reason}; check that it runs, and the address",
            ) from error
        except requests.exceptions.RequestException as error:
            raise OSError(errno.EIO, f"the request to the HDFS server {_address(url)} failed: {error}") from error
        if answer.status_code >= 400:
            raise _named(answer)
        return answer


class _PastTheEndError(OSError):
    """Raised if a byte range begins after the end of the file."""


class _FolderNotEmptyError(OSError):
    """Raised if a folder with contents was to be deleted like a file."""


class _StandbyError(OSError):
    """Raised if the NameNode that was called is on standby."""


class _UnreachableError(OSError):
    """Raised if a server did not accept a connection, so that the request had no effect."""


def _named(answer: requests.Response) -> OSError:
    """Returns the Python error for an HTTP answer, chosen by the class of Hadoop's exception in the answer."""
    try:
        found = answer.json()["RemoteException"]
        name, message = str(found["exception"]), str(found["message"]).partition("\n")[0]
    except (ValueError, KeyError, TypeError):
        name, message = "", answer.reason or ""
    text = f"{name or 'HTTP'} ({answer.status_code}): {message}"
    if name == "AccessControlException" and message.endswith("(is not a directory)"):
        # A name below a file, for a user who is not the superuser.
        return FileNotFoundError(errno.ENOENT, text)
    if name == "IOException" and "out of the range" in message:
        return _PastTheEndError(errno.EINVAL, text)
    if answer.status_code == 401:
        return PermissionError(
            errno.EACCES,
            f"{text}; the server requires Kerberos or a password, and tidegate supports only simple authentication",
        )
    kind, code = _KINDS.get(name, (OSError, errno.EIO))
    return kind(code, text)


_KINDS: Mapping[str, tuple[type[OSError], int]] = {
    "FileNotFoundException": (FileNotFoundError, errno.ENOENT),
    "FileAlreadyExistsException": (FileExistsError, errno.EEXIST),
    "PathIsNotEmptyDirectoryException": (_FolderNotEmptyError, errno.EPERM),
    "StandbyException": (_StandbyError, errno.EIO),
    "AccessControlException": (PermissionError, errno.EACCES),
    "SecurityException": (PermissionError, errno.EACCES),
    "DSQuotaExceededException": (OSError, errno.EDQUOT),
    "NSQuotaExceededException": (OSError, errno.EDQUOT),
}


def _info(path: str, status: Mapping[str, Any]) -> FileInfo:
    return FileInfo(path, status["length"], status["modificationTime"], str(status["fileId"]))


def _address(url: str) -> str:
    return url.partition("/webhdfs/")[0]


def name_nodes(scheme: str, authority: str, url: str) -> NameNodes:
    """Returns the NameNodes of `hdfs://`, `webhdfs://` or `swebhdfs://` and the authority (host or name service) of a
    URL. Raises ConfigurationError if they are unknown.
    """
    if scheme == "hdfs":
        return _of_hadoop(_Settings(), authority, url)
    host, _, port = authority.partition(":")
    if not host or (port and not port.isdecimal()):
        raise ConfigurationError(f"{url!r} names no NameNode; write {scheme}://namenode:{HTTP_PORT}/folder")
    transport = "https" if scheme == "swebhdfs" else "http"
    return NameNodes((f"{transport}://{host}:{port or HTTP_PORT}",))


class _Settings:
    """Settings of Hadoop: `core-site.xml` and `hdfs-site.xml` in the folder `HADOOP_CONF_DIR`."""

    def __init__(self) -> None:
        self.folder = os.environ.get("HADOOP_CONF_DIR", "")
        self._values: dict[str, str] = {}
        for name in ("core-site.xml", "hdfs-site.xml"):
            path = Path(self.folder, name)
            if self.folder and path.is_file():
                self._values |= _properties(path)

    def get(self, name: str, default: str = "") -> str:
        return self._values.get(name, default).strip()

    def words(self, name: str) -> list[str]:
        return [word.strip() for word in self.get(name).split(",") if word.strip()]


def _properties(path: Path) -> dict[str, str]:
    try:
        root = ElementTree.parse(path).getroot()
    except (ElementTree.ParseError, OSError) as error:
        raise ConfigurationError(
            f"cannot read Hadoop's settings in {path}: {error}; correct the file, or HADOOP_CONF_DIR"
        ) from error
    pairs = ((each.findtext("name"), each.findtext("value")) for each in root.iter("property"))
    return {name.strip(): value or "" for name, value in pairs if name}


def _of_hadoop(settings: _Settings, authority: str, url: str) -> NameNodes:
    default = settings.get("fs.defaultFS").partition("://")[2].rstrip("/")
    authority = authority or default
    host, _, port = authority.partition(":")
    write = f"write webhdfs://NAMENODE:{HTTP_PORT}/folder"
    if not host:
        raise ConfigurationError(
            f"{url!r} names no NameNode, and HADOOP_CONF_DIR ({settings.folder or 'not set'}) has no "
            f"fs.defaultFS: {write}"
        )
    if settings.get("hadoop.security.authentication", "simple").lower() not in ("", "simple"):
        raise ConfigurationError(
            f"storage at {url}: {settings.folder} sets hadoop.security.authentication to "
            f"{settings.get('hadoop.security.authentication')!r}, and tidegate supports only 'simple'. Mount HDFS by "
            "NFS, or use another storage"
        )
    secure = settings.get("dfs.http.policy", "HTTP_ONLY").upper() == "HTTPS_ONLY"
    key = f"dfs.namenode.{'https' if secure else 'http'}-address"
    transport = "https" if secure else "http"
    if not port and host in settings.words("dfs.nameservices"):
        nodes = settings.words(f"dfs.ha.namenodes.{host}")
        keys = [f"{key}.{host}.{node}" for node in nodes] or [f"{key}.{host}"]
        found = [settings.get(each) for each in keys]
        if not all(found):
            missing = next(each for each, value in zip(keys, found, strict=True) if not value)
            raise ConfigurationError(f"storage at {url}: {settings.folder} has no {missing}: set it, or {write}")
        return NameNodes(tuple(f"{transport}://{each}" for each in found))
    given = settings.get(key)
    if given and authority == default:
        of, _, at = given.partition(":")
        return NameNodes((f"{transport}://{host if of in ('', _NEVER) else of}:{at or HTTP_PORT}",))
    if port:
        raise ConfigurationError(
            f"{url!r} names a port of Hadoop's own protocol. tidegate reaches HDFS by WebHDFS: {write}, or set "
            f"HADOOP_CONF_DIR to a folder with {key}"
        )
    return NameNodes((f"{transport}://{host}:{HTTP_PORT}",))
