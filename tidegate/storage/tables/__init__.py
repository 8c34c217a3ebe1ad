"""Output tables: data files, and the commit log that decides which of them count."""
