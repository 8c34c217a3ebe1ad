"""Requests to S3 through s3fs, each of which ends: answered, refused, or given up in time.

Rules kept here:

- No request waits for ever: there are connect and read timeouts, and a bound around all attempts together. What is
  given up is cancelled, and does not go on in the background. The `Expect: 100-continue` handler is removed, because
  botocore waits for the answer to it without any timeout.
- There is one loop of attempts, with a limit and growing pauses, and it covers the body of an answer too. Those of
  botocore, s3fs and aiohttp are switched off: they would multiply with it, none of them reads bodies, and aiohttp
  repeats every put whose connection broke, also one that must not be repeated.
- Only what can pass is tried again: a server that is busy or broken, a connection that broke. A refusal is not.
- The region comes from the environment: `client_kwargs={"region_name": …}` would be ignored by parts of the stack.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from aiobotocore.httpsession import AIOHTTPSession
from aiohttp import ClientError as HttpError
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError
from botocore.exceptions import ConnectionError as NoConnectionError
from botocore.handlers import add_expect_header
from botocore.parsers import ResponseParserError
from s3fs import S3FileSystem

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.request_counts import OF_THIS_PROCESS

T = TypeVar("T")

TRIES_MAX = 8
PAUSE_S_FIRST = 0.1
PAUSE_S_MAX = 5.0
"""Pauses of 5.6 to 11.3 s in all: a server that is started again is waited for."""
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_LOOP_GRACE_S = 5.0
"""How much longer than a request's bound its caller waits for the loop to notice it."""
_BUSY_STATUS = (408, 429, 500, 502, 503, 504)
_BUSY_CODES = ("RequestTimeout", "SlowDown", "InternalError")
_BROKEN_CONNECTION = (
    HTTPClientError,
    NoConnectionError,
    IncompleteReadError,
    ResponseParserError,
    HttpError,
    ConnectionError,
    TimeoutError,
)
_FORBIDDEN_REGION = (
    "give the S3 region by the environment variable AWS_DEFAULT_REGION, not by client_kwargs={'region_name': …}"
)


class _HttpSession(AIOHTTPSession):  # type: ignore[misc]
    """Connections of a client, without an attempt of aiohttp's own after one that broke."""

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        session._retry_connection = False
        return session


class _S3FileSystem(S3FileSystem):  # type: ignore[misc]
    """s3fs whose client, also one made anew after a closed session, never waits for `100 Continue`."""

    _without_expect: object = None

    async def set_session(self, refresh: bool = False, kwargs: dict[str, Any] | None = None) -> Any:
        client = await super().set_session(refresh, kwargs or {})
        # _s3 rather than the return value: s3fs calls this before each request and returns either.
        if self._s3 is not None and self._s3 is not self._without_expect:
            self._s3.meta.events.unregister("before-call.s3", add_expect_header)
            self._without_expect = self._s3
        return client


class S3Requests:
    """Requests of one client. Thread-safe. Faults are OSError: those of s3fs, TimeoutError, or EIO for the rest."""

    def __init__(self, options: dict[str, Any], timeout_ms: int) -> None:
        """`options` are s3fs's (`key`, `secret`, …); `timeout_ms` bounds all attempts of a request together."""
        options = dict(options)
        _check_endpoint(options)
        if "region_name" in (options.get("client_kwargs") or {}):
            raise ConfigurationError(_FORBIDDEN_REGION)
        self._timeout_s = timeout_ms / 1000
        config: dict[str, Any] = {"connect_timeout": self._timeout_s / 4, "read_timeout": self._timeout_s / 3}
        config.update(options.pop("config_kwargs", {}))
        config |= {"retries": {"total_max_attempts": 1}, "http_session_cls": _HttpSession}
        options.pop("asynchronous", None)
        options["use_listings_cache"] = False
        self._fs = _S3FileSystem(config_kwargs=config, **options)
        self._fs.retries = 1

    def call(self, operation: str, **arguments: object) -> Any:
        """The answer to one request, e.g. `put_object`."""
        return self.wait_for(self.start(operation, **arguments))

    def call_decisive(self, operation: str, tries_max: int, not_applied: tuple[int, ...], **arguments: object) -> Any:
        """The answer to a request that must not be repeated once it may have been applied.

        Only answers with one of the `not_applied` statuses, which say that nothing was done, are followed by another
        attempt.
        """
        return self.wait_for(
            self._start(
                lambda: self._fs._call_s3(operation, **arguments),
                tries_max,
                lambda error: status_of(error) in not_applied,
            )
        )

    def start(self, operation: str, **arguments: object) -> Future[Any]:
        """Begin a request; it goes on beside the caller, until it is done or cancelled."""
        return self._start(lambda: self._fs._call_s3(operation, **arguments), TRIES_MAX, _can_pass)

    def get(self, **arguments: object) -> tuple[bytes, dict[str, Any]]:
        """The body of an object, or of a range of it, and the answer; one that breaks off is asked for again."""

        async def body() -> tuple[bytes, dict[str, Any]]:
            answer = await self._fs._call_s3("get_object", **arguments)
            async with answer["Body"] as stream:
                return bytes(await stream.read()), answer

        return self.wait_for(self._start(body, TRIES_MAX, _can_pass))

    def wait_for(self, request: Future[T]) -> T:
        """The result of a request that was started, which ends by itself."""
        try:
            return request.result(self._timeout_s + _LOOP_GRACE_S)
        except TimeoutError as error:
            if request.done():
                raise
            raise self._no_answer() from error
        finally:
            # The caller may have been interrupted.
            request.cancel()

    def _start(
        self, request: Callable[[], Awaitable[T]], tries_max: int, again: Callable[[BaseException], bool]
    ) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(self._attempts(request, tries_max, again), self._fs.loop)

    async def _attempts(
        self, request: Callable[[], Awaitable[T]], tries_max: int, again: Callable[[BaseException], bool]
    ) -> T:
        last: Exception | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                for attempt in range(tries_max):
                    OF_THIS_PROCESS.s3_request(again=attempt > 0)
                    try:
                        return await request()
                    except (OSError, BotoCoreError, HttpError) as error:
                        last = error
                        if not again(error):
                            break
                    if attempt + 1 < tries_max:
                        # Many tasks meet the same busy server at the same time: they come back at different ones.
                        pause_s = min(PAUSE_S_FIRST * 2**attempt, PAUSE_S_MAX)
                        await asyncio.sleep(pause_s * (0.5 + random.random() / 2))
        except TimeoutError as error:
            raise self._no_answer(last) from (last or error)
        assert last is not None
        raise _named(last) from last

    def _no_answer(self, last: Exception | None = None) -> TimeoutError:
        why = "is the endpoint reachable?" if last is None else f"the last attempt: {_named(last)}"
        return TimeoutError(errno.ETIMEDOUT, f"no answer within {self._timeout_s:g} s; {why}")


def status_of(error: BaseException) -> int | None:
    """HTTP status of the answer that an error of s3fs was made from, if there was an answer."""
    cause = _client_error(error)
    status = None if cause is None else cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return int(status) if status is not None else None


def _named(error: Exception) -> OSError:
    """An error of the same class that names the code of S3 and the HTTP status: the message alone may be empty."""
    cause = _client_error(error)
    if cause is None:
        return error if isinstance(error, OSError) else OSError(errno.EIO, str(error))
    answer = cause.response.get("Error", {})
    code, message = answer.get("Code") or "no code", answer.get("Message")
    text = f"{code} (HTTP {status_of(error)})" + (f": {message}" if message else "")
    kind = type(error) if isinstance(error, OSError) else OSError
    return kind(getattr(error, "errno", None) or errno.EIO, text)


def _check_endpoint(options: dict[str, Any]) -> None:
    """ConfigurationError for an endpoint that is no URL: what botocore says of it names neither it nor the setting."""
    given = {
        "the option endpoint_url": options.get("endpoint_url"),
        "client_kwargs={'endpoint_url': …}": (options.get("client_kwargs") or {}).get("endpoint_url"),
        **{f"the environment variable {name}": os.environ.get(name) for name in ENDPOINT_VARIABLES},
    }
    for where, endpoint in given.items():
        if endpoint and not str(endpoint).startswith(("http://", "https://")):
            raise ConfigurationError(
                f"the S3 endpoint {str(endpoint)!r} in {where} has no scheme: write http://{endpoint} or https://{endpoint}"
            )


def _can_pass(error: BaseException) -> bool:
    cause = _client_error(error)
    if cause is None:
        return isinstance(error, _BROKEN_CONNECTION)
    return status_of(error) in _BUSY_STATUS or cause.response.get("Error", {}).get("Code") in _BUSY_CODES


def _client_error(error: BaseException) -> ClientError | None:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ClientError):
        cause = cause.__cause__
    return cause
