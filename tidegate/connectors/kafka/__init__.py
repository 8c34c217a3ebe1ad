"""Kafka source and sink: offsets, topics, consumer groups, and encoding of records."""
