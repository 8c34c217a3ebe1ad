"""Functions of users that see a row at a time, and the operator that calls them."""
