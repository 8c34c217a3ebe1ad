"""Values of SQL: types, expressions with a type, and operators."""
