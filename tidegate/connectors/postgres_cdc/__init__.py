"""Changes of PostgreSQL tables, read from the server's own log: logical replication with pgoutput."""
