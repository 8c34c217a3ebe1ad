"""Windows whose rows a function of the user gets: all rows of a key and window as an Arrow table."""
