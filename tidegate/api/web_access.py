"""`WebAccess`: starts the web server of an environment, or finds the running one.

All environments on a Ray cluster share one server.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING
from urllib.parse import quote

from tidegate.actors.local.local_runtime import LocalRuntime
from tidegate.actors.runtimes.running_job import Runtime
from tidegate.storage.extras import need
from tidegate.storage.ids import JobId
from tidegate.web.options import WebOptions, digest_of, find_token

if TYPE_CHECKING:
    from tidegate.web.server import WebServer


class WebAccess:
    """The web server that shows the jobs of one environment. `url` is its address, or None before `serve`."""

    def __init__(self, runtime: Runtime) -> None:
        self.url: str | None = None
        self._runtime = runtime
        self._server: WebServer | None = None

    def serve(self, options: WebOptions) -> str:
        """Starts the web server, unless it already runs, prints its address, and returns it.

        Raises ConfigurationError if the server cannot start.
        """
        if self.url is not None:
            return self.url
        need("serve_web", "web")
        if isinstance(self._runtime, LocalRuntime):
            self.url = self._serve_here(options, self._runtime)
        else:
            self.url = self._serve_on_ray(options)
        _, where = find_token()
        print(f"tidegate: jobs are shown at {self.url} (token for changes: {where})", file=sys.stderr)
        return self.url

    def page_of(self, job_id: JobId) -> str | None:
        """Returns the address of the web page of a job, or None if the web server is not started."""
        return None if self.url is None else f"{self.url}/ui/jobs/{quote(job_id)}"

    def close(self) -> None:
        """Stops the web server if it runs in this process.

        The server of a Ray cluster continues, because other environments use it.
        """
        server, self._server, self.url = self._server, None, None
        if server is not None:
            server.stop()

    def _serve_here(self, options: WebOptions, runtime: LocalRuntime) -> str:
        from tidegate.web.jobs_in_process import LocalJobs
        from tidegate.web.server import WebServer

        self._server = WebServer(LocalJobs(runtime.ended), options, digest_of(find_token()[0]))
        return self._server.url

    def _serve_on_ray(self, options: WebOptions) -> str:
        from tidegate.web.actor import serve_on_ray

        return serve_on_ray(options, self._runtime.open_store)
