"""Stores of files: local folders, S3 and memory behind one interface."""
