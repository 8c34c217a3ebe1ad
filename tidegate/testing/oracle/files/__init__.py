"""Oracles of files: what lies in storage while a job runs, and what readers see of it."""
