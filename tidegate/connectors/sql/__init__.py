"""Database connectors: PostgreSQL through ADBC, which exchanges Arrow batches, and other databases through
SQLAlchemy.
"""
