"""Creates the SparkSession of a program whose configuration runs Ray in Spark's executors.

Rules:

* If a master does not answer, Spark tries for a minute, and then fails with pages of Java errors. So the addresses in
  `spark.master` are tried first, within `REACH_TIMEOUT_S`.
* Spark Connect is refused before anything starts, because tidegate needs the process of Spark's driver.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from tidegate.protocol.failures import bounded_text
from tidegate.spark_bridge.errors import SparkBridgeError, SparkTimeoutError
from tidegate.spark_bridge.java import ensure_java
from tidegate.spark_bridge.spark_calls import call_bounded
from tidegate.storage.errors import ConfigurationError

REACH_TIMEOUT_S = 8.0
_STANDALONE = "spark://"
_KUBERNETES = "k8s://"
_REMOTE = "spark.remote"
_REMOTE_VARIABLE = "SPARK_REMOTE"


def spark_session(app_name: str, configs: Mapping[str, str]) -> SparkSession:
    """Returns the session of this process, or a new one with these settings.

    A new session runs on the master in `configs`, or else on the master from `spark-submit` or Spark's own
    configuration. It belongs to the program and ends with its process. Raises ConfigurationError for Spark Connect and
    for a master that cannot be reached, and SparkBridgeError if Spark does not start.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    refuse_remote(configs, os.environ)
    check_master(configs.get("spark.master", ""))
    ensure_java()
    conf = SparkConf().setAppName(app_name).setAll(list(configs.items()))
    # A SparkConf reads Spark's own configuration only once there is a JVM.
    SparkContext._ensure_initialized(conf=conf)
    master = configs.get("spark.master") or str(SparkConf().get("spark.master", ""))
    if "spark.master" not in configs:
        check_master(master)
    builder = SparkSession.builder.appName(app_name)
    for key, value in configs.items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except Exception as error:
        why = bounded_text(" ".join(str(error).split()))
        raise SparkBridgeError(f"Spark did not start on the master {master!r}: {why}") from error


def refuse_remote(configs: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """Raises ConfigurationError if settings or environment variables select Spark Connect."""
    for name, value in ((_REMOTE, configs.get(_REMOTE)), (_REMOTE_VARIABLE, environ.get(_REMOTE_VARIABLE))):
        if value:
            raise ConfigurationError(
                f"{name}={value!r}: Spark Connect is not supported, because tidegate runs in the process of Spark's "
                f"driver. Remove {name}, and set spark.master to the master of the cluster"
            )


def check_master(master: str) -> None:
    """Raises ConfigurationError if no address in `spark.master` accepts a connection in time.

    Masters without an address ("local[2]", "yarn") are not checked.
    """
    addresses = _addresses(master)
    if not addresses:
        return
    try:
        failures = call_bounded(
            lambda: _failures(addresses), timeout_s=REACH_TIMEOUT_S, what=f"reaching {master}", advice=""
        )
    except SparkTimeoutError:
        failures = [f"no answer within {REACH_TIMEOUT_S:g} s"]
    if failures:
        raise ConfigurationError(
            f"Spark's master {master} cannot be reached ({'; '.join(failures)}): start it, or correct spark.master"
        )


def _addresses(master: str) -> list[tuple[str, int]]:
    """Returns the hosts and ports in `spark.master`.

    Raises ConfigurationError for an address that Spark could not parse.
    """
    if master.startswith(_STANDALONE):
        urls = [f"//{each}" for each in master.removeprefix(_STANDALONE).split(",")]
    elif master.startswith(_KUBERNETES):
        url = master.removeprefix(_KUBERNETES)
        urls = [url if re.match(r"https?://", url) else f"//{url}"]
    else:
        return []
    found = []
    for url in urls:
        try:
            parts = urlsplit(url)
            host = parts.hostname
            port = parts.port
        except ValueError:
            host = None
            port = None
        if host is None or port is None:
            raise ConfigurationError(
                f"spark.master={master!r}: host:port is needed for each master; write spark://host:port"
            )
        found.append((host, port))
    return found


def _failures(addresses: list[tuple[str, int]]) -> list[str]:
    """Returns why each address refuses connections, or an empty list if one accepts them."""
    failures = []
    for host, port in addresses:
        try:
            socket.create_connection((host, port), timeout=REACH_TIMEOUT_S / (len(addresses) + 1)).close()
        except OSError as error:
            failures.append(f"{host}:{port}: {error.strerror or error}")
        else:
            return []
    return failures
