"""The commit log of a table, in parts: its entries, how they rest, and what folds over them tell."""
