"""A real Prometheus for tests: Debian's package, unpacked into this project, on loopback, gone when the block ends."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from debian_program import NotHadError, get
from waiting import until

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
(DASHBOARD,) = (CONFIGS / "grafana").glob("*.json")
PROGRAMS = ("prometheus", "promtool")
ANSWER_TIMEOUT_S = 300.0
"""A limit, not a measure: a busy machine takes its time."""


@cache
def programs() -> Path:
    """The folder of prometheus and promtool. Skips the test, with the reason, where they cannot be had."""
    installed = [shutil.which(name) for name in PROGRAMS]
    if installed[0] is not None and all(installed):
        return Path(installed[0]).parent
    try:
        return get(PROGRAMS[0]) / "usr" / "bin"
    except NotHadError as error:
        pytest.skip(f"no Prometheus here: {error}")


def promtool(*arguments: str) -> str:
    """What promtool prints. AssertionError, with all of it, if it finds something wrong."""
    command = [str(programs() / "promtool"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Prometheus:
    """A server that runs."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The series that answer a query now. AssertionError for one that Prometheus does not understand."""
        try:
            found = self._get("/api/v1/query?" + urllib.parse.urlencode({"query": query}))
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from error
        series: list[dict[str, Any]] = found["data"]["result"]
        return series

    def rules(self) -> list[dict[str, Any]]:
        """The alert rules, with what came of them last."""
        groups = self._get("/api/v1/rules")["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    @property
    def ready(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=ANSWER_TIMEOUT_S) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + path, timeout=ANSWER_TIMEOUT_S) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


@contextmanager
def run_prometheus(folder: Path, targets: Sequence[str], interval: str = "1s") -> Iterator[Prometheus]:
    """Start a server with the configuration of this project, which asks `targets` every `interval`."""
    config = yaml.safe_load((CONFIGS / "prometheus.yaml").read_text(encoding="utf-8"))
    discovery = folder / "targets.json"
    discovery.write_text(json.dumps([{"labels": {}, "targets": list(targets)}]))
    config["global"] = dict.fromkeys(config["global"], interval)
    config["rule_files"] = [str(CONFIGS / name) for name in config["rule_files"]]
    (scrape,) = config["scrape_configs"]
    scrape["file_sd_configs"][0]["files"] = [str(discovery)]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [
        str(programs() / "prometheus"),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        server = Prometheus(f"http://{address}")
        until("Prometheus", lambda: server.ready or process.poll() is not None)
        assert process.poll() is None, (folder / "prometheus.log").read_text(errors="replace")[-2000:]
        yield server
    finally:
        process.kill()
        process.wait()
