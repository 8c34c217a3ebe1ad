"""Where a server listens, and where its token is kept."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tidegate.storage.errors import ConfigurationError
from tidegate.web.options import WebOptions, digest_of, find_token, is_loopback, listen, token_file, url_of


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of this test, without a token in the environment."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TIDEGATE_REST_TOKEN", raising=False)
    return tmp_path


def test_a_token_is_made_once_and_kept(home: Path) -> None:
    """For this user alone; the second time it is the same."""
    token, where = find_token()
    assert (len(token), where) == (43, str(token_file()))
    assert token_file().stat().st_mode & 0o777 == 0o600
    assert token_file().parent.stat().st_mode & 0o777 == 0o700
    assert find_token()[0] == token
    assert os.listdir(home / ".tidegate") == ["rest_token"]


def test_the_token_of_the_environment_wins(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the environment, and then no file is made."""
    monkeypatch.setenv("TIDEGATE_REST_TOKEN", "token-of-the-environment")
    assert find_token()[0] == "token-of-the-environment"
    assert not token_file().exists()


def test_a_file_of_others_is_not_used(home: Path) -> None:
    """A link, a folder that others may write to, and a file without a token are refused."""
    folder = home / ".tidegate"
    folder.mkdir(mode=0o700)
    (home / "other").write_text("a-token-of-somebody-else")
    token_file().symlink_to(home / "other")
    with pytest.raises(ConfigurationError, match="cannot be stored"):
        find_token()
    token_file().unlink()
    token_file().write_text("short")
    with pytest.raises(ConfigurationError, match="delete the file"):
        find_token()
    folder.chmod(0o777)
    with pytest.raises(ConfigurationError, match="other users"):
        find_token()


@pytest.mark.parametrize(
    "options",
    [
        *({"port": port} for port in (-1, 65_536, True, 1.5, "80")),
        *({"address": address} for address in ("", "a b", 5)),
    ],
)
def test_web_options_refuse_wrong_values(options: dict[str, object]) -> None:
    """They are refused where they are given."""
    with pytest.raises(ConfigurationError, match="rest\\."):
        WebOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", ["short", "x;" * 10])
def test_a_token_of_a_wrong_form_is_refused(token: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable, which is where it was set."""
    monkeypatch.setenv("TIDEGATE_REST_TOKEN", token)
    with pytest.raises(ConfigurationError, match="TIDEGATE_REST_TOKEN is not a valid token"):
        find_token()


def test_a_port_that_is_taken() -> None:
    """The next one is taken; where all are, the error says what to do; a host that is not here is no port's fault."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with listen(WebOptions(port)) as found:
            assert port < found.getsockname()[1] <= port + 16
            assert url_of(found, WebOptions(port)) == f"http://127.0.0.1:{found.getsockname()[1]}"
    with pytest.raises(ConfigurationError, match=r"rest\.bind-address"):
        listen(WebOptions(0, "192.0.2.1"))


def test_only_this_machine_is_loopback() -> None:
    """Names and addresses of this machine alone."""
    assert all(is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.3.2.1"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", ""))
    assert WebOptions(address="0.0.0.0").open_to_others


def test_a_token_may_be_any_text() -> None:
    """Also what UTF-8 cannot write."""
    assert digest_of("\ud800") != digest_of("x")
