"""Windows: specifications of windows, and the operators that aggregate rows in them or call functions with them."""
