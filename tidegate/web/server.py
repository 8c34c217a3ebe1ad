"""`WebServer`: serves the jobs of a runtime over HTTP, in a thread with its own event loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from tidegate.web.jobs import Jobs
from tidegate.web.options import WebOptions, listen, url_of
from tidegate.web.page.pages import page_routes
from tidegate.web.rest import ERRORS, Changing, Reading, error_answer
from tidegate.web.security import Access, ConnectionLimits, Gate, LimitedConnections, Limits, login_routes
from tidegate.web.watch import JobWatch

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 256
"""Further connections are immediately answered with status 503."""
KEEP_ALIVE_S = 5
STOP_S = 5.0


class WebServer:
    """A server that listens until `stop` is called. Raises ConfigurationError if it cannot listen.

    `digest` is the hash of the token.
    """

    def __init__(
        self,
        jobs: Jobs,
        options: WebOptions,
        digest: bytes,
        limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008 (frozen)
    ) -> None:
        self._socket = listen(options)
        self.url = url_of(self._socket, options)
        self.watch = JobWatch(jobs)
        access = Access(digest, options.open_to_others)
        config = uvicorn.Config(
            make_app(self.watch, access, page_routes(self.watch)),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="on",
            limit_concurrency=CONNECTIONS_MAX,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            server_header=False,
            date_header=False,
            ws="none",
            loop="asyncio",
            http=LimitedConnections(limits),  # type: ignore[arg-type]
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="tidegate-web", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stops listening and ends the thread."""
        self._server.should_exit = True
        self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except BaseException:
            log.exception("the web server at %s has ended", self.url)
        finally:
            self._socket.close()


PREFIXES = ("", "/v1")
"""Prefixes of all paths: Flink's paths also work with the version of its API."""


def make_app(
    watch: JobWatch,
    access: Access,
    pages: Sequence[BaseRoute] = (),
    limits: Limits = Limits(),  # noqa: B008 (frozen)
) -> ASGIApp:
    """Returns the ASGI application: REST API, login, `pages` (routes of the job pages), and the gate before them.

    The watch looks at the jobs while the application runs.
    """
    reading = Reading(watch)
    changing = Changing(watch)
    rest = [route for prefix in PREFIXES for route in (*reading.routes(prefix), *changing.routes(prefix))]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with watch.running():
            yield

    handlers = dict.fromkeys((*ERRORS, Exception), error_answer)
    app = Starlette(routes=[*rest, *login_routes(access), *pages], lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Gate(app, access, limits)
