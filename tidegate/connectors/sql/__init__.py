"""Databases: PostgreSQL through ADBC, which exchanges Arrow batches, and everything else through SQLAlchemy."""
