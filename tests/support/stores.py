"""Stores that any test can ask for: a local folder, memory, S3, Google Cloud Storage, Azure and HDFS; a broker of
Apache Kafka, PostgreSQL and MariaDB.

What makes them is imported when a test asks: most runs of a few tests can do without a client for S3.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from kafka_server import KafkaServer
    from object_servers import ObjectServer
    from postgres_server import PostgresDatabase, PostgresServer
    from seaweed import S3Server
    from stores_of_sql import Database

    from tidegate.storage.files.file_system_store import FileSystemStore

T = TypeVar("T")


def opened(url: str, **options: object) -> FileSystemStore:
    """The store at a url."""
    from tidegate.storage.files.file_system_store import open_store

    return open_store(url, **options)


def opened_like(store: FileSystemStore, url: str) -> FileSystemStore:
    """The store at a url, with the options of another store."""
    return opened(url, **store._options)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One SeaweedFS for the session; the region comes from the environment, as the store asks for."""
    from seaweed import run_seaweed

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        with run_seaweed(tmp_path_factory.mktemp("seaweed")) as server:
            yield server


@pytest.fixture
def local_store(tmp_path: Path) -> FileSystemStore:
    """An empty store in a local folder that does not exist yet."""
    return opened(str(tmp_path / "root"))


@pytest.fixture
def memory_store() -> Iterator[FileSystemStore]:
    """An empty store in memory."""
    store = opened(f"memory://{uuid.uuid4().hex}")
    yield store
    store.delete_tree("")


@pytest.fixture
def s3_store(s3_server: S3Server) -> FileSystemStore:
    """An empty store under a prefix of its own on the S3 server."""
    from seaweed import BUCKET

    return opened(f"s3://{BUCKET}/{uuid.uuid4().hex}/ckpt", **s3_server.options)


@contextmanager
def object_server(kind: str, folder: Path) -> Iterator[ObjectServer]:
    """A running server, which programs find by the environment; skips the test where it cannot be had."""
    import object_servers as servers

    library = {"gcs": "gcsfs", "azure": "adlfs", "hdfs": "requests"}[kind]
    pytest.importorskip(library, reason=f"{library} is not installed: pip install 'tidegate[{kind}]'")
    run = {"gcs": servers.run_gcs, "azure": servers.run_azurite, "hdfs": servers.run_hdfs}[kind]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        try:
            server = stack.enter_context(run(folder))
        except servers.ServerUnavailable as error:
            pytest.skip(f"the server of {kind} cannot be started here: {error}")
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="session")
def gcs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """One fake-gcs-server for the session."""
    with object_server("gcs", tmp_path_factory.mktemp("gcs")) as server:
        yield server


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """One Azurite for the session."""
    with object_server("azure", tmp_path_factory.mktemp("azure")) as server:
        yield server


@pytest.fixture(scope="session")
def hdfs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """One HDFS for the session."""
    with object_server("hdfs", tmp_path_factory.mktemp("hdfs")) as server:
        yield server


@pytest.fixture
def gcs_store(gcs_server: ObjectServer) -> FileSystemStore:
    """An empty store under a prefix of its own on the server of Google Cloud Storage."""
    return opened(gcs_server.new_url())


@pytest.fixture
def azure_store(azure_server: ObjectServer) -> FileSystemStore:
    """An empty store under a prefix of its own on Azurite."""
    return opened(azure_server.new_url())


@pytest.fixture
def hdfs_store(hdfs_server: ObjectServer) -> FileSystemStore:
    """An empty store in a folder of its own on HDFS."""
    return opened(hdfs_server.new_url())


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest) -> FileSystemStore:
    """Each kind of store in turn."""
    chosen: FileSystemStore = request.getfixturevalue(f"{request.param}_store")
    return chosen


def _started(name: str, server: AbstractContextManager[T], unavailable: type[Exception]) -> Iterator[T]:
    """Starts a server, or skips the test if it cannot run here."""
    with ExitStack() as stack:
        try:
            started = stack.enter_context(server)
        except unavailable as error:
            pytest.skip(f"{name} cannot be started here: {error}")
        yield started


@pytest.fixture(scope="session")
def kafka_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    """One broker of Apache Kafka for the session; each test has topics of its own."""
    from kafka_server import KafkaUnavailable, run_kafka

    server = run_kafka(tmp_path_factory.mktemp("kafka"), "-XX:TieredStopAtLevel=1")
    yield from _started("Apache Kafka", server, KafkaUnavailable)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One PostgreSQL for the session; each test has a database of its own on it (`postgres`)."""
    from postgres_server import PostgresUnavailable, run_postgres

    yield from _started("PostgreSQL", run_postgres(), PostgresUnavailable)


@pytest.fixture
def postgres(postgres_server: PostgresServer) -> Iterator[PostgresDatabase]:
    """An empty database of the session's PostgreSQL."""
    from postgres_server import new_database

    with new_database(postgres_server) as database:
        yield database


@pytest.fixture(scope="session")
def mariadb_url() -> Iterator[str]:
    """The URL of one MariaDB for the session; each test has a database of its own on it (`mariadb`)."""
    from stores_of_sql import MariaUnavailable, run_mariadb

    yield from _started("MariaDB", run_mariadb(), MariaUnavailable)


@pytest.fixture
def mariadb(mariadb_url: str) -> Iterator[Database]:
    """An empty database of the session's MariaDB."""
    from stores_of_sql import new_mariadb_database

    with new_mariadb_database(mariadb_url) as database:
        yield database
