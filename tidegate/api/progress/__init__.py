"""How far a bounded job is, shown in its driver."""
