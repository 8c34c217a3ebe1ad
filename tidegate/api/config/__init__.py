"""Declares the settings, and reads them from Python, from YAML files with Flink's keys, and from environment
variables.
"""
