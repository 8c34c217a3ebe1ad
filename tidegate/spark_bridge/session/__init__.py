"""A Spark session on Ray: its Java, its resources, its start and its stop."""
