"""Change data capture from PostgreSQL by logical replication with the plugin pgoutput."""
