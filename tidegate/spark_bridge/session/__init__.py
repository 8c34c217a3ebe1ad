"""A Spark session on Ray: which Java, which resources, started and stopped in bounded time."""
