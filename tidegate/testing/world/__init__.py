"""Virtual time, random choices, storage and faults of a simulation. All of it is determined by one seed."""
