"""When Ray may read its token from a file, and who else can read that file."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tidegate.actors.ray import authentication as auth_token
from tidegate.actors.ray.authentication import close_token_file, make_token_file, switch_on_token
from tidegate.storage.errors import ConfigurationError


@pytest.fixture(autouse=True)
def a_process_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests may have loaded Ray; its settings are not to be changed by these."""
    monkeypatch.delitem(auth_token.sys.modules, "ray", raising=False)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with the file in which Ray keeps a token that it has made, as Ray makes it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("secret")
    token.chmod(0o644)
    return tmp_path


def test_rays_own_token_is_used_and_closed_to_others(home: Path) -> None:
    """Ray leaves it open to be read, and does not send it to an address that was named."""
    environ: dict[str, str] = {}
    switch_on_token(environ)
    assert environ == {"RAY_AUTH_MODE": "token"}
    assert stat.S_IMODE((home / ".ray" / "auth_token").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("environ", "mode"),
    [
        ({"RAY_AUTH_TOKEN": "secret"}, "token"),
        ({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "secret"}, "disabled"),
        ({"RAY_AUTH_MODE": "token"}, "token"),
        ({}, None),
    ],
)
def test_the_mode_follows_the_token_unless_it_is_said(
    environ: dict[str, str], mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a token nothing is switched on, and Ray says what is missing."""
    monkeypatch.setenv("HOME", str(tmp_path))
    switch_on_token(environ)
    assert environ.get("RAY_AUTH_MODE") == mode


def test_a_cluster_that_asks_for_no_token_gets_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In token mode this process would refuse the cluster's own calls, which have none."""
    asked: list[str] = []

    def answers(address: str) -> bool:
        asked.append(address)
        return address == "open:1"

    monkeypatch.setattr(auth_token, "answers_without_token", answers)
    for address, environ in (("open:1", {}), ("closed:1", {"RAY_AUTH_MODE": "token"})):
        found: dict[str, str] = {}
        switch_on_token(found, address)
        assert found == environ
    said = {"RAY_AUTH_MODE": "token"}
    switch_on_token(said, "open:1")
    assert said == {"RAY_AUTH_MODE": "token"}
    assert asked == ["open:1", "closed:1"], "a mode that was said counts"
    assert (home / ".ray" / "auth_token").is_file()


@pytest.mark.parametrize("address", ["auto", "local", "ray://head:10001", "127.0.0.1:1"])
def test_what_does_not_answer_counts_as_asking(address: str) -> None:
    """An address that only Ray understands, and one where nobody is."""
    assert not auth_token.answers_without_token(address)


def test_a_token_that_another_may_have_planted_is_not_used(home: Path, tmp_path: Path) -> None:
    """A link, or a file to which others can write; nor is a file that was named and is not there passed over."""
    token = home / ".ray" / "auth_token"
    token.chmod(0o622)
    with pytest.raises(ConfigurationError, match=r"can be written to by other users \(mode 0622\)"):
        switch_on_token({})
    token.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(token)
    with pytest.raises(ConfigurationError, match="link is not used, because it is a link"):
        switch_on_token({"RAY_AUTH_TOKEN_PATH": str(link)})
    with pytest.raises(ConfigurationError, match="is not a regular file"):
        switch_on_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path)})
    with pytest.raises(ConfigurationError, match=r"RAY_AUTH_TOKEN_PATH=.*there is no such file"):
        switch_on_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "nothing")})


def test_a_token_is_made_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Ray makes one that others can read: the file is 0600, its folder 0700, and it is made once."""
    monkeypatch.setenv("HOME", str(tmp_path))
    make_token_file({})
    path = tmp_path / ".ray" / "auth_token"
    token = path.read_text()
    assert len(token) == 2 * auth_token.TOKEN_BYTES
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)
    path.chmod(0o644)
    make_token_file({})
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == (token, 0o600)


@pytest.mark.parametrize("environ", [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "secret"}])
def test_no_token_is_made_that_ray_would_not_use(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is another one, and where Ray uses none."""
    monkeypatch.setenv("HOME", str(tmp_path))
    make_token_file(environ)
    assert not (tmp_path / ".ray").exists()


def test_an_open_token_of_a_ray_that_runs_is_closed(home: Path) -> None:
    """As `ray.init` has left it."""
    close_token_file({})
    assert stat.S_IMODE((home / ".ray" / "auth_token").stat().st_mode) == 0o600
