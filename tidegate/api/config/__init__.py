"""Declares the settings, and reads them from Python, from files with Flink's keys, and from environment variables."""
