"""What the JVM of Spark's driver prints reaches the user, but for lines that nobody can act on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyspark.context
import pytest

from tidegate.actors.ray.connection import is_notice
from tidegate.spark_bridge.java import filter_jvm_output, hand_on

STAMP = "[2026-11-22 10:06:59,587 {} 10637 11078]"
GCS_CLIENT = STAMP + " gcs_client.cc:96: GcsClient has no Cluster ID set, and won't fetch from GCS."


def pumps() -> set[threading.Thread]:
    """The threads that hand lines on."""
    return {thread for thread in threading.enumerate() if thread.name == "tidegate-jvm-output"}


@pytest.mark.parametrize(
    "line",
    [
        "NOTE: Picked up JDK_JAVA_OPTIONS: --add-opens=java.base/java.lang=ALL-UNNAMED",
        "26/11/22 10:06:48 WARN Utils: Your hostname, vm resolves to a loopback address: 127.0.0.1; using 192.0.2.2",
        "26/11/22 10:06:48 WARN Utils: Set SPARK_LOCAL_IP if you need to bind to another address",
        "26/11/22 10:06:50 WARN NativeCodeLoader: Unable to load native-hadoop library for your platform... using Java",
        "ERROR StatusConsoleListener Reconfiguration failed: No configuration found for 'Default' at 'null' in 'null'",
        'Setting default log level to "WARN".',
        "To adjust logging level use sc.setLogLevel(newLevel). For SparkR, use setLogLevel(newLevel).",
        GCS_CLIENT.format("I"),
    ],
)
def test_notices_of_the_jvm_are_dropped(line: str) -> None:
    """Each line that a start of Spark on Ray used to print is left out."""
    assert is_notice(line)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Exception in thread NOTE: Picked up JDK_JAVA_OPTIONS: -X",
        "NOTE: Picked up JAVA_TOOL_OPTIONS: -Xmx1g",
        "26/11/22 10:06:48 WARN Utils: Service 'sparkDriver' could not bind on port 1. Attempting port 2.",
        "26/11/22 10:06:48 ERROR NativeCodeLoader: Unable to load native-hadoop library for your platform... x",
        "ERROR StatusConsoleListener Unrecognized format specifier [d]",
        GCS_CLIENT.format("E"),
    ],
)
def test_other_lines_of_the_jvm_pass(line: str) -> None:
    """A line that only resembles a notice may matter."""
    assert not is_notice(line)


def test_lines_are_handed_on_until_the_pipe_is_closed(tmp_path: Path) -> None:
    """What is no notice comes through unchanged, a last line without an end and odd bytes included."""
    read_end, write_end = os.pipe()
    os.write(write_end, b'one\nSetting default log level to "WARN".\ntwo \xff\r\nthree')
    os.close(write_end)
    with (tmp_path / "out").open("wb") as out:
        hand_on(read_end, out.fileno())
    assert (tmp_path / "out").read_bytes() == b"one\ntwo \xff\r\nthree"


def test_a_jvm_goes_on_when_nobody_reads_what_it_prints() -> None:
    """The pipe is emptied although the other end of the output is gone."""
    read_end, write_end = os.pipe()
    reader, output = os.pipe()
    os.close(reader)
    pump = threading.Thread(target=hand_on, args=(read_end, output))
    pump.start()
    with os.fdopen(write_end, "wb") as jvm:
        for _ in range(3_000):
            jvm.write(b"x" * 99 + b"\n")
    pump.join()
    os.close(output)


def test_a_jvm_that_pyspark_starts_prints_through_the_filter(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both streams of the process are filtered, and only once if that is asked for twice."""
    program = (
        "import sys; print('out'); print('NOTE: Picked up JDK_JAVA_OPTIONS: -X', file=sys.stderr); "
        "print('err', file=sys.stderr)"
    )

    def launch(conf: Any = None, popen_kwargs: dict[str, Any] | None = None) -> int:
        return subprocess.run([sys.executable, "-c", program], check=True, **(popen_kwargs or {})).returncode

    monkeypatch.setattr(pyspark.context, "launch_gateway", launch)
    before = pumps()
    filter_jvm_output()
    filter_jvm_output()
    assert pyspark.context.launch_gateway.unfiltered is launch  # type: ignore[attr-defined]
    assert pyspark.context.launch_gateway() == 0  # type: ignore[no-untyped-call]
    for thread in pumps() - before:
        thread.join()
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("out\n", "err\n")
