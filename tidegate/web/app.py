"""`make_app`: the web server's application: REST, the page, and the gate before both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from tidegate.web.rest.answers import ERRORS, error_answer
from tidegate.web.rest.changing import Changing
from tidegate.web.rest.reading import Reading
from tidegate.web.security.access import Access
from tidegate.web.security.gate import Gate, Limits
from tidegate.web.security.login import login_routes
from tidegate.web.watch import JobWatch

PREFIXES = ("", "/v1")
"""Flink's paths hold with its version in front, too."""


def make_app(
    watch: JobWatch,
    access: Access,
    pages: Sequence[BaseRoute] = (),
    limits: Limits = Limits(),  # noqa: B008 (frozen)
) -> ASGIApp:
    """The application for these jobs. `pages`: routes of the page. The watch looks as long as the application runs."""
    reading, changing = Reading(watch), Changing(watch)
    rest = [route for prefix in PREFIXES for route in (*reading.routes(prefix), *changing.routes(prefix))]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with watch.running():
            yield

    handlers = dict.fromkeys((*ERRORS, Exception), error_answer)
    app = Starlette(routes=[*rest, *login_routes(access), *pages], lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Gate(app, access, limits)
