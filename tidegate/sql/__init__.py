"""SQL over streams: a query is translated into steps of the public API, and into nothing else (`docs/sql.md`)."""
