"""Keyed state of operators: the backends that hold it while a job runs, vectorised and key by key."""
