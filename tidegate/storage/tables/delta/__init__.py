"""Tables that are Delta Lake tables too: what such a table can hold, and what its log follows."""
