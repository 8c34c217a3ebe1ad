"""The text of a query: how it is read, and where something stands in it."""
