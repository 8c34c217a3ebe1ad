"""Types and columns of stored rows: how types evolve, how dictionaries are stored, and exact casts."""
