"""Windows: which rows belong together in time or number, and the operators that aggregate them."""
