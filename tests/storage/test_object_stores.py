"""What is special to Google Cloud Storage, Azure and HDFS: which urls and servers are refused, and lost answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from object_servers import BUCKET, ObjectServer

from tidegate.storage.errors import ConfigurationError, NotFoundError, StorageError
from tidegate.storage.files.file_system_store import FileSystemStore, check_conditional_create, open_store
from tidegate.storage.files.object_files import ObjectClient, ObjectFiles

LIMIT_MS = 60_000
ACCOUNT = "DefaultEndpointsProtocol=https;AccountName=mine;AccountKey=a2V5;EndpointSuffix=core.windows.net"


@pytest.mark.parametrize(
    ("url", "extra", "library"),
    [
        ("gs://bucket/x", "gcs", "gcsfs"),
        ("abfs://container/x", "azure", "adlfs"),
        ("hdfs://host/x", "hdfs", "requests"),
        ("webhdfs://host/x", "hdfs", "requests"),
    ],
)
def test_a_missing_extra_is_named(url: str, extra: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the way to install it."""
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigurationError, match=rf"^storage at {url} needs {library}, .*'tidegate\[{extra}\]'"):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("gs://", "no bucket; write gs://"),
        ("abfs://", "no container; write abfs://"),
        ("oss://b/x", "Mount it as a folder"),
    ],
)
def test_urls_without_a_place_are_refused(url: str, named: str) -> None:
    """The error has what to write."""
    with pytest.raises(ConfigurationError, match=named):
        open_store(url)


def test_a_server_that_replaces_is_refused(gcs_store: FileSystemStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an emulator does that ignores preconditions."""
    from tidegate.storage.files.gcs_client import GcsClient

    put = GcsClient.put

    async def without_condition(self: GcsClient, bucket: str, name: str, data: bytes, mark: str | None) -> None:
        await put(self, bucket, name, data, None)

    monkeypatch.setattr(GcsClient, "put", without_condition)
    with pytest.raises(ConfigurationError, match=r"no conditional create that is reliable.*replaced the file"):
        check_conditional_create(gcs_store)
    assert gcs_store.list("") == []


@pytest.fixture(params=["gcs", "azure"])
def client(request: pytest.FixtureRequest) -> ObjectClient:
    """The client of each service."""
    request.getfixturevalue(f"{request.param}_server")
    if request.param == "gcs":
        from tidegate.storage.files.gcs_client import GcsClient

        return GcsClient({})
    from tidegate.storage.files.azure_client import AzureClient

    return AzureClient({}, f"abfs://{BUCKET}")


def test_a_create_that_was_repeated_recognizes_its_own_file(
    client: ObjectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients repeat a request without an answer, and the second one finds the name taken."""
    put = client.put

    async def twice(bucket: str, name: str, data: bytes, mark: str | None) -> None:
        await put(bucket, name, data, mark)
        await put(bucket, name, data, mark)

    monkeypatch.setattr(client, "put", twice)
    files, key = ObjectFiles(client, LIMIT_MS, LIMIT_MS), f"{BUCKET}/repeated"
    assert files.create(key, b"own")
    assert not files.create(key, b"own")
    assert files.read(key, 0, None) == b"own"


@pytest.mark.parametrize("kind", ["gcs", "azure"])
def test_data_may_look_like_a_boundary(request: pytest.FixtureRequest, kind: str) -> None:
    """Of the parts of an upload that gcsfs makes, for instance."""
    store: FileSystemStore = request.getfixturevalue(f"{kind}_store")
    data = b"a\n--==0==--\r\n--==0==\nb"
    store.write("f", [data])
    assert store.read("f") == data


def test_a_missing_bucket_is_no_missing_file(gcs_server: ObjectServer, azure_server: ObjectServer) -> None:
    """Nothing could be written there."""
    for url, what in (("gs://no-such-bucket/x", "bucket"), ("abfs://no-such-container/x", "container")):
        store = open_store(url)
        for operation in (lambda: store.create("f", b"x"), lambda: store.list("")):  # noqa: B023
            with pytest.raises(StorageError, match=f"the {what} .*does not exist") as caught:
                operation()
            assert not isinstance(caught.value, NotFoundError)


def test_the_account_of_a_url_must_be_that_of_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client would take the keys' account, and leave the url's alone."""
    pytest.importorskip("adlfs", reason="adlfs is not installed: pip install 'tidegate[azure]'")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", ACCOUNT)
    assert open_store("abfss://box@mine.dfs.core.windows.net/x").url == "abfs://box@mine.dfs.core.windows.net/x"
    with pytest.raises(ConfigurationError, match="names the account 'yours', and the credentials are for 'mine'"):
        open_store("abfss://box@yours.dfs.core.windows.net/x")


def test_a_url_without_an_account_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the environment names none either."""
    pytest.importorskip("adlfs", reason="adlfs is not installed: pip install 'tidegate[azure]'")
    for name in ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match=r"no Azure account .*AZURE_STORAGE_CONNECTION_STRING"):
        open_store("abfs://box/x")


def hadoop(folder: Path, properties: Mapping[str, str]) -> None:
    """Settings of Hadoop in a folder."""
    lines = [f"<property><name>{name}</name><value>{value}</value></property>" for name, value in properties.items()]
    (folder / "hdfs-site.xml").write_text(f"<configuration>{''.join(lines)}</configuration>")


TWO = {
    "fs.defaultFS": "hdfs://lake",
    "dfs.nameservices": "lake, other",
    "dfs.ha.namenodes.lake": "a,b",
    "dfs.namenode.http-address.lake.a": "one:9870",
    "dfs.namenode.http-address.lake.b": "two:9871",
}
ONE = {"fs.defaultFS": "hdfs://main:8020", "dfs.namenode.http-address": "0.0.0.0:9999"}
TLS = {"dfs.http.policy": "HTTPS_ONLY", "dfs.namenode.https-address": "main:9871", "fs.defaultFS": "hdfs://main:8020"}


@pytest.mark.parametrize(
    ("settings", "url", "opened", "addresses"),
    [
        ({}, "webhdfs://main/a", "webhdfs://main/a", ("http://main:9870",)),
        ({}, "webhdfs://main:14000", "webhdfs://main:14000", ("http://main:14000",)),
        ({}, "swebhdfs://main:9871/a/", "swebhdfs://main:9871/a", ("https://main:9871",)),
        ({}, "hdfs://main/a", "hdfs://main/a", ("http://main:9870",)),
        (ONE, "hdfs://main:8020/a", "hdfs://main:8020/a", ("http://main:9999",)),
        (ONE, "hdfs:///a", "hdfs:///a", ("http://main:9999",)),
        (TLS, "hdfs://main:8020/a", "hdfs://main:8020/a", ("https://main:9871",)),
        (TWO, "hdfs://lake/a", "hdfs://lake/a", ("http://one:9870", "http://two:9871")),
        (TWO, "hdfs:///a", "hdfs:///a", ("http://one:9870", "http://two:9871")),
    ],
)
def test_the_name_nodes_come_from_the_url_or_from_hadoop(
    settings: Mapping[str, str],
    url: str,
    opened: str,
    addresses: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An address of HTTP is needed, and `hdfs://` has one of another protocol."""
    pytest.importorskip("requests", reason="requests is not installed: pip install 'tidegate[hdfs]'")
    hadoop(tmp_path, settings)
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    store = open_store(url)
    assert (store.url, store.place) == (opened, f"hdfs {' '.join(addresses)}")


@pytest.mark.parametrize(
    ("settings", "url", "named"),
    [
        ({}, "hdfs://main:8020/a", r"port of Hadoop's own protocol.*write webhdfs://NAMENODE:9870/folder"),
        ({}, "hdfs:///a", "names no NameNode, and HADOOP_CONF_DIR"),
        ({}, "webhdfs:///a", "names no NameNode; write webhdfs://"),
        ({}, "webhdfs://me@main/a", "write webhdfs://main/a, and set HADOOP_USER_NAME"),
        ({**TWO, "dfs.ha.namenodes.lake": "a,c"}, "hdfs://lake/a", r"has no dfs.namenode.http-address.lake.c"),
        ({"hadoop.security.authentication": "kerberos"}, "hdfs://main/a", "'kerberos', and tidegate supports only"),
    ],
)
def test_an_hdfs_that_cannot_be_reached_is_refused(
    settings: Mapping[str, str], url: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to write instead."""
    pytest.importorskip("requests", reason="requests is not installed: pip install 'tidegate[hdfs]'")
    hadoop(tmp_path, settings)
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    with pytest.raises(ConfigurationError, match=named):
        open_store(url)


class _Standby(BaseHTTPRequestHandler):
    """A NameNode on standby, or one that wants Kerberos."""

    def do_GET(self) -> None:
        """Refuse."""
        kerberos = "/secure" in self.path
        body = b"" if kerberos else b'{"RemoteException": {"exception": "StandbyException", "message": "standby"}}'
        self.send_response(401 if kerberos else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: stderr belongs to the test run."""


@pytest.fixture
def standby() -> Iterator[str]:
    """Address of a NameNode on standby."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Standby)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_active_name_node_is_found(
    hdfs_server: ObjectServer, standby: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one that refuses the connection, and one on standby."""
    active = hdfs_server.root.removeprefix("webhdfs://").partition("/")[0]
    nodes = {"a": "127.0.0.1:1", "b": standby, "c": active}
    addresses = {f"dfs.namenode.http-address.lake.{node}": at for node, at in nodes.items()}
    hadoop(tmp_path, {"dfs.nameservices": "lake", "dfs.ha.namenodes.lake": "a,b,c", **addresses})
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    store = open_store(hdfs_server.new_url().replace(f"webhdfs://{active}", "hdfs://lake"))
    store.write("f", [b"x"])
    assert store.read("f") == b"x"


def test_kerberos_is_told(standby: str) -> None:
    """A server that wants it refuses every request."""
    pytest.importorskip("requests", reason="requests is not installed: pip install 'tidegate[hdfs]'")
    with pytest.raises(StorageError, match=r"requires Kerberos or a password.*check credentials"):
        open_store(f"webhdfs://{standby}/secure").create("f", b"x")


def test_a_killed_write_on_hdfs_leaves_a_file_that_is_swept(
    hdfs_server: ObjectServer, hdfs_store: FileSystemStore
) -> None:
    """It is never listed, and is deleted on demand with nothing else."""
    from tidegate.storage.files.hdfs_files import HdfsFiles, name_nodes

    hdfs_store.write("d/f", [b"x"])
    authority, _, folder = hdfs_store.url.removeprefix("webhdfs://").partition("/")
    nodes = name_nodes("webhdfs", authority, hdfs_store.url)
    files = HdfsFiles(nodes, hdfs_server.environment["HADOOP_USER_NAME"], LIMIT_MS, LIMIT_MS)
    files.write(f"/{folder}/d/.tmp-left", [b"torn"])
    assert (hdfs_store.list("d"), [file.path for file in hdfs_store.walk("d")]) == (["f"], ["f"])
    assert hdfs_store.delete_temporary("d") == 1
    assert hdfs_store.delete_temporary("d") == 0
    assert hdfs_store.read("d/f") == b"x"


def test_a_folder_with_many_files_is_listed_in_parts(hdfs_store: FileSystemStore) -> None:
    """All of them, and those of a missing folder are none."""
    names = [f"{number:02d}" for number in range(12)]
    for name in names:
        hdfs_store.write(f"d/{name}", [b"x"])
    assert hdfs_store.list("d") == names
    assert hdfs_store.list("missing") == []


def test_missing_credentials_are_told(client: ObjectClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that refuses a request does not tell where the client has looked for keys."""

    async def refused(bucket: str, name: str) -> None:
        raise PermissionError(13, "HTTP 401: anonymous")

    assert client.advice == ""
    monkeypatch.setattr(client, "head", refused)
    monkeypatch.setattr(client, "advice", "set a variable")
    with pytest.raises(PermissionError, match="HTTP 401: anonymous set a variable"):
        ObjectFiles(client, LIMIT_MS, LIMIT_MS).exists(f"{BUCKET}/f")
