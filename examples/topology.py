"""Where an example runs: Spark on Ray, or Ray in the executors of a Spark cluster. The program is the same.

    TIDEGATE_TOPOLOGY=raydp                 Ray on this machine, and Spark on it through RayDP: the default
    TIDEGATE_TOPOLOGY=local-cluster         a Spark cluster that this process starts, and Ray in its executors: the
                                            default where RayDP is not installed
    TIDEGATE_TOPOLOGY=local-cluster[2,1,1024]   the same, with so many executors, cores and MiB, whatever is asked for
    TIDEGATE_TOPOLOGY=standalone            a master and a worker of Spark, started and stopped here, and Ray in there
    TIDEGATE_TOPOLOGY=spark://host:7077     a Spark cluster that exists, and Ray in there

Each has two executors of one core for Spark's tasks, and two task slots beside each, unless the example asks for
others. `docs/topologies.md` says which to choose.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

import tidegate as tg
from tidegate.spark_bridge import ensure_java

VARIABLE = "TIDEGATE_TOPOLOGY"
EXECUTOR_MIB = 1024


@contextmanager
def environment(
    executors: int = 2,
    slots_per_executor: int = 2,
    *,
    options: tg.DataPlaneOptions | None = None,
    spark_configs: Mapping[str, str] | None = None,
) -> Iterator[tg.StreamEnvironment]:
    """An environment with Spark, as the variable says; whatever was started for it ends with the block."""
    chosen = os.environ.get(VARIABLE) or default_topology()
    # What tasks print lies in Ray's session directory.
    ray_options = {"log_to_driver": False}
    if chosen == "raydp":
        with tg.StreamEnvironment.raydp(
            executors=executors,
            executor_cores=1,
            executor_memory=f"{EXECUTOR_MIB}m",
            slots_per_executor=slots_per_executor,
            options=options,
            spark_configs=spark_configs,
            ray_options=ray_options,
        ) as env:
            yield env
        return
    nodes: int | None = executors
    slots: int | None = slots_per_executor
    # A slot takes a core of its executor; one is left for Spark's own tasks.
    cores, mib = slots_per_executor + 1, EXECUTOR_MIB
    if (said := re.fullmatch(r"local-cluster\[(\d+),(\d+),(\d+)\]", chosen)) is not None:
        # How much of these executors Ray takes is left to `on_spark`.
        executors, cores, mib = map(int, said.groups())
        chosen, nodes, slots = "local-cluster", None, None
    with (
        master_of(chosen, executors, cores, mib) as master,
        spark_on(master, executors, cores, mib, spark_configs) as spark,
        tg.StreamEnvironment.on_spark(spark, nodes, slots, options=options, ray_options=ray_options) as env,
    ):
        yield env


def default_topology() -> str:
    """Returns the topology of an example that was given none. Reports it if RayDP is not installed."""
    if importlib.util.find_spec("raydp") is not None:
        return "raydp"
    print(f"RayDP is not installed: Ray runs in executors of a Spark {pyspark.__version__} cluster", flush=True)
    return "local-cluster"


@contextmanager
def master_of(chosen: str, executors: int, cores: int, mib: int = EXECUTOR_MIB) -> Iterator[str]:
    """The url of a Spark cluster."""
    ensure_java()
    if chosen == "local-cluster":
        yield f"local-cluster[{executors},{cores},{mib}]"
    elif chosen == "standalone":
        with standalone(executors, cores) as url:
            yield url
    elif chosen.startswith("spark://"):
        yield chosen
    else:
        sys.exit(f"{VARIABLE}={chosen}: it is raydp, local-cluster, standalone, or the url of a Spark master")


@contextmanager
def standalone(executors: int, cores: int, executor_mib: int = EXECUTOR_MIB) -> Iterator[str]:
    """A master and a worker of the installed PySpark, on loopback; both end with the block."""
    spark_class = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"spark://127.0.0.1:{port}"
    here = ["--host", "127.0.0.1", "--webui-port", "0"]
    room = ["--cores", str(executors * cores), "--memory", f"{executors * executor_mib}m"]
    running: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as name:
        commands = {
            "master": ["org.apache.spark.deploy.master.Master", *here, "--port", str(port)],
            "worker": ["org.apache.spark.deploy.worker.Worker", *here, *room, "--work-dir", name, url],
        }
        try:
            for what, command in commands.items():
                with (Path(name) / f"{what}.log").open("wb") as log:
                    # They become the Java processes, so that what is ended below are these.
                    running.append(
                        subprocess.Popen(
                            [spark_class, *command],
                            env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"},
                            stdout=log,
                            stderr=subprocess.STDOUT,
                        )
                    )
            yield url
        finally:
            for process in reversed(running):
                process.terminate()
                process.wait()


@contextmanager
def spark_on(
    master: str,
    executors: int,
    cores: int,
    executor_mib: int = EXECUTOR_MIB,
    configs: Mapping[str, str] | None = None,
) -> Iterator[SparkSession]:
    """A session on a cluster, with executors of so many cores."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {
        "spark.executor.cores": str(cores),
        "spark.cores.max": str(executors * cores),
        "spark.executor.instances": str(executors),
        "spark.executor.memory": f"{executor_mib}m",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        **(configs or {}),
    }
    if master.startswith(("local-cluster", "spark://127.0.0.1:")):
        # Everything is on this machine, so nothing of Spark need be reachable from outside.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", **settings}
    builder = SparkSession.builder.master(master).appName("tidegate")
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    folder = Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent) / "work"
    logs = folder / spark.sparkContext.applicationId
    try:
        yield spark
    finally:
        spark.stop()
        if master.startswith("local-cluster"):
            # Executors of such a cluster leave their folders where Spark is installed.
            shutil.rmtree(logs, ignore_errors=True)
            with suppress(OSError):  # There may be others.
                folder.rmdir()
