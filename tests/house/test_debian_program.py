"""Programs of Debian are got with what they need, unpacked, and got once; where that cannot be, one line says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from debian_program import NotHadError, get, library_path, missing_packages

SIMULATED = """\
NOTE: This is only a simulation!
Inst libnew (1.2-3 Debian:12.5/stable [amd64])
Inst program [1:1.0-1] (2.0~rc1-1~deb12u1 Debian:12.5/stable [amd64]) []
Conf libnew (1.2-3 Debian:12.5/stable [amd64])
"""
APT = """#!/bin/sh
echo "$@" >> {folder}/calls
case "$1" in
  --simulate) cat {folder}/simulated ;;
  download) shift; for package in "$@"; do touch "$package.deb"; done ;;
esac
"""
REFUSING_APT = "#!/bin/sh\necho 'W: slow' >&2\necho 'E: Unable to locate package program' >&2\nexit 100\n"
DPKG = '#!/bin/sh\nmkdir -p "$3/usr/lib/x86_64-linux-gnu/own"\ntouch "$3/usr/lib/x86_64-linux-gnu/own/lib.so.1"\n'


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an apt-get and a dpkg-deb that stand for the real ones."""
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "simulated").write_text(SIMULATED)
    _program(folder / "apt-get", APT.format(folder=folder))
    _program(folder / "dpkg-deb", DPKG)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_what_is_missing_is_named_with_its_version() -> None:
    """What is downloaded is what was looked at, also where an older version is installed."""
    assert missing_packages(SIMULATED) == ["libnew=1.2-3", "program=2.0~rc1-1~deb12u1"]


def test_a_program_is_got_once(tools: Path, tmp_path: Path) -> None:
    """The second time it is there."""
    folders = {get("program", tmp_path / "into") for _ in range(2)}
    assert folders == {tmp_path / "into" / "program"}
    assert (tools / "calls").read_text().splitlines() == [
        "--simulate --no-install-recommends install program",
        "download libnew=1.2-3 program=2.0~rc1-1~deb12u1",
    ]
    assert [path.name for path in (tmp_path / "into").iterdir()] == ["program"]
    (folder,) = folders
    assert library_path(folder) == str(folder / "usr/lib/x86_64-linux-gnu/own")


def test_a_package_that_nobody_knows_is_an_error_in_one_line(tools: Path, tmp_path: Path) -> None:
    """With apt's own words, and nothing left behind."""
    _program(tools / "apt-get", REFUSING_APT)
    with pytest.raises(NotHadError, match=r"failed: E: Unable to locate package program$"):
        get("program", tmp_path / "into")
    assert not (tmp_path / "into").exists()


def test_a_program_that_is_installed_is_not_got(tools: Path, tmp_path: Path) -> None:
    """It is on the PATH."""
    (tools / "simulated").write_text("")
    with pytest.raises(NotHadError, match="program is installed already"):
        get("program", tmp_path / "into")


def test_a_machine_without_apt_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Linux, or no Linux."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotHadError, match="has no apt-get"):
        get("program", tmp_path / "into")
