"""`WebServer`: serves the jobs of a runtime over HTTP, on a thread of its own with an event loop of its own."""

from __future__ import annotations

import logging
import threading

import uvicorn

from tidegate.web.app import make_app
from tidegate.web.jobs import Jobs
from tidegate.web.options import WebOptions, listen, url_of
from tidegate.web.page.routes import page_routes
from tidegate.web.security.access import Access
from tidegate.web.security.connections import ConnectionLimits, LimitedConnections
from tidegate.web.watch import JobWatch

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 256
"""More are answered with 503 at once."""
KEEP_ALIVE_S = 5
STOP_S = 5.0


class WebServer:
    """One server: it listens from its making to `stop`. Raises ConfigurationError where it cannot listen.

    `digest` is that of the token.
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
        """Whether it answers."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Answer nobody any more."""
        self._server.should_exit = True
        self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except BaseException:
            log.exception("the web server at %s has ended", self.url)
        finally:
            self._socket.close()
