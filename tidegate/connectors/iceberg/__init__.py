"""Reads and writes Apache Iceberg tables through pyiceberg."""
