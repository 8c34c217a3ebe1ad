"""Formats of files and payloads: CSV, JSON, text, Avro, Parquet, Protobuf, Debezium, and formats of a schema
registry.
"""
