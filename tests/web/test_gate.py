"""Who may come in, how much and how often."""

from __future__ import annotations

import asyncio

import pytest
from asgi_client import Client
from fixed_watch import MANY, TOKEN, WITH_TOKEN, FixedWatch, app_of, client_of
from fixture_jobs import JOB_ID
from hypothesis import given, settings
from hypothesis import strategies as st
from turns import turn

from tidegate.web.security import Buckets, Limits

SAVEPOINTS = f"/jobs/{JOB_ID}/savepoints"


@pytest.mark.parametrize("host", ["127.0.0.1:8081", "localhost", "[::1]:8081", "LOCALHOST:1"])
def test_loopback_reads_without_a_token(host: str) -> None:
    """Whoever is on this machine may read."""
    assert client_of().get("/jobs", host=host).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:8081", "", "10.0.0.7:8081", "127.0.0.1.evil.example", "localhost:80:evil.com", "localhost:",
        "localhost:x", "[::1", "[::1]evil.com", "[::1]:80:1", "evil@localhost", "localhost/x", "localhost evil.com",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/jobs", "/ui/login", f"/ui/jobs/x?token={TOKEN}"])
def test_another_name_of_this_machine_is_refused(host: str, path: str) -> None:
    """A site that has its own name point to this machine sends its name, and gets nothing, no login either."""
    reply = client_of().get(path, host=host)
    assert (reply.status, "loopback" in reply.reason) == (400, True)


def test_elsewhere_everything_needs_the_token() -> None:
    """A header, or for reading a cookie; a page sends people to the form."""
    client = client_of(open_to_others=True)
    assert client.get("/jobs", host="node-7:8081").status == 401
    assert client.get("/jobs", host="node-7:8081", **WITH_TOKEN).status == 200
    assert client.get("/jobs", cookie=f"a=b; tidegate_rest_token={TOKEN}").status == 200
    assert client.get("/jobs", cookie="tidegate_rest_token=wrong").status == 403
    assert client.get("/jobs", cookie='"').status == 401
    assert client.get("/ui/jobs/x").headers["location"] == "/ui/login"
    assert client.post(SAVEPOINTS, cookie=f"tidegate_rest_token={TOKEN}").status == 401


def test_a_browser_gets_the_cookie() -> None:
    """By the form, or by a link whose token leaves the address at once; not with a wrong token."""
    client = client_of(open_to_others=True)
    assert client.get("/ui/login").status == 200
    taken = client.post("/ui/login", f"token={TOKEN}".encode())
    assert (taken.status, taken.headers["location"]) == (303, "/")
    assert "HttpOnly" in taken.headers["set-cookie"]
    assert "SameSite=Strict" in taken.headers["set-cookie"]
    assert client.post("/ui/login", b"token=wrong").status == 403
    link = client.get(f"/ui/jobs/x?a=1&token={TOKEN}")
    assert (link.status, link.headers["location"]) == (303, "/ui/jobs/x?a=1")
    assert client.get("/ui/jobs/x?token=wrong").status == 403


def test_a_link_leads_to_no_other_host() -> None:
    """Whatever the path is, the answer to a link with the token stays here, and has no header of the client's."""
    client = client_of()
    reply = client.get(f"/ui/\r\nset-cookie: x?token={TOKEN}")
    assert "\n" not in reply.headers["location"]
    assert reply.headers["location"].startswith("/ui/")


def test_bodies_have_a_limit() -> None:
    """By what they say of themselves, and by what comes."""
    client = client_of()
    said = client.ask("POST", SAVEPOINTS, b"", {**WITH_TOKEN, "content-length": "1" + "0" * 30})
    assert said.status == 413
    assert client.post(SAVEPOINTS, b" " * 16_385, **WITH_TOKEN).status == 413
    headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {TOKEN}".encode())]
    assert client.raw("POST", SAVEPOINTS, b"", headers, [b" " * 9_000] * 2).status == 413
    assert client.post(SAVEPOINTS, b" " * 16_384, **WITH_TOKEN).status == 202


def test_a_flood_waits_for_its_refusal() -> None:
    """What is over the limit is answered with 429 after a pause; another client is not concerned."""
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    app = app_of(FixedWatch(), Limits(a_second=1, burst=3), clock_s=lambda: 100.0, wait=pause)
    first, second = Client(app), Client(app, peer="127.0.0.2")
    assert [first.get("/jobs").status for _ in range(5)] == [200, 200, 200, 429, 429]
    assert pauses == [1.0, 1.0]
    assert first.get("/jobs").headers["retry-after"] == "1"
    assert second.get("/jobs").status == 200


def test_requests_at_once_have_a_limit() -> None:
    """One more than the limit is refused while the others are answered."""
    watch = FixedWatch()

    async def both() -> list[int]:
        release, known = asyncio.Event(), watch.known

        async def view() -> object:
            await release.wait()
            return known

        watch.view = view  # type: ignore[assignment, method-assign]
        client = Client(app_of(watch, Limits(at_once=1, burst=100)))
        request = ("GET", "/jobs", b"", [(b"host", b"localhost")], [b""])
        slow = asyncio.create_task(client.asked(*request))
        await turn()
        refused = await client.asked(*request)
        release.set()
        return [(await slow).status, refused.status]

    assert asyncio.run(both()) == [200, 429]


def test_a_fault_of_ours_is_told_as_one() -> None:
    """500 with a reason, and the server goes on."""
    watch = FixedWatch()
    watch.error = RuntimeError("broken")
    client = client_of(watch)
    reply = client.post(SAVEPOINTS, **WITH_TOKEN)
    assert (reply.status, "failed" in reply.reason) == (500, True)
    assert client.get("/jobs").status == 200


def test_answers_are_neither_kept_nor_guessed_at() -> None:
    """Headers that every answer has, refusals included."""
    for reply in (client_of().get("/jobs"), client_of().get("/nothing"), client_of().get("/jobs", host="x")):
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["cache-control"] == "no-store"


def test_buckets_fill_again() -> None:
    """So many a second, never more than a bucket holds; clients that ask no more are forgotten."""
    buckets = Buckets(2.0, 4, clients_max=10)
    assert [buckets.take("a", 0.0) for _ in range(5)] == [True] * 4 + [False]
    assert [buckets.take("a", 1.0) for _ in range(3)] == [True, True, False]
    assert [buckets.take("a", 900.0) for _ in range(5)] == [True] * 4 + [False]
    assert not buckets.take("a", 0.0)
    for number in range(100):
        buckets.take(str(number), 900.0)
    assert len(buckets) == 10


words = st.sampled_from(["jobs", JOB_ID, "checkpoints", "details", "latest", "17", "subtasks", "sum-by-key", "vertices",
                         "v1", "savepoints", "stop", "ui", "login", "", "backpressure", "metrics", "%00"])  # fmt: skip
paths = st.lists(words | st.text(max_size=8), max_size=6).map(lambda parts: "/" + "/".join(parts))
headers = st.lists(
    st.tuples(
        st.sampled_from([b"host", b"authorization", b"cookie", b"content-length", b"content-type", b"x"]),
        st.binary(max_size=30) | st.sampled_from([b"localhost", f"Bearer {TOKEN}".encode(), b"tidegate_rest_token=1"]),
    ),
    max_size=4,
)
METHODS = ["GET", "HEAD", "POST", "PATCH", "PUT", "DELETE", "OPTIONS", "BREW"]


@given(st.sampled_from(METHODS), paths, st.binary(max_size=40), headers, st.lists(st.binary(max_size=60), max_size=3))
@settings(max_examples=300, deadline=None)
def test_no_bytes_break_the_server(
    method: str, path: str, query: bytes, sent: list[tuple[bytes, bytes]], body: list[bytes]
) -> None:
    """Whatever comes is answered, or refused with a reason: never 500."""
    always = [(b"host", b"localhost"), (b"authorization", f"Bearer {TOKEN}".encode()), *sent]
    reply = Client(app_of(FixedWatch(), MANY)).raw(method, path, query, always, body)
    assert reply.status < 500
    if reply.status >= 400 and method != "HEAD" and "json" in reply.headers["content-type"]:
        assert reply.reason
