"""Functions of a row that are run once on a symbolic row, and become expressions over whole batches."""
