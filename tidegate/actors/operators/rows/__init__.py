"""Functions of users that see one row at a time, and the operators that call them."""
