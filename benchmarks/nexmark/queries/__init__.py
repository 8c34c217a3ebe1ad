"""The queries, by name."""

from __future__ import annotations

from nexmark.queries import aggregates, joins, ranking, stateless, windows
from nexmark.query import Query

_ALL = (*stateless.QUERIES, *aggregates.QUERIES, *joins.QUERIES, *ranking.QUERIES, *windows.QUERIES)
QUERIES: dict[str, Query] = {query.name: query for query in sorted(_ALL, key=lambda query: int(query.name[1:]))}
