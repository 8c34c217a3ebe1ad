"""Settings by subject: each section has its fields, their names and keys, and what contradicts what."""
