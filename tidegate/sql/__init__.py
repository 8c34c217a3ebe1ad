"""SQL over streams. A query is translated into steps of the public API only (`docs/sql.md`)."""
