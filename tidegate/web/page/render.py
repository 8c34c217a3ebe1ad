"""`render`: a page as HTML. Every value is escaped, and one that is missing is an error, not an empty place."""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from tidegate.web.page import texts


def render(template: str, **values: object) -> str:
    """A template with these values."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("tidegate.web.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {
        "size": lambda value: _unbroken(texts.size(value)),
        "span": lambda value: _unbroken(texts.span(value)),
        "count": texts.count,
        "rate": texts.rate,
        "percent": lambda value: _unbroken(texts.percent(value)),
        "clock": texts.clock,
        "moment": texts.moment,
        "machine_moment": texts.machine_moment,
        "ago": texts.ago,
        "bounded_line": texts.line,
        "quoted": texts.quoted,
    }
    environment.tests["known"] = texts.is_moment
    environment.globals["unknown"] = texts.UNKNOWN
    return environment


def _unbroken(text: str) -> str:
    """A number stays on one line with its unit."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")
