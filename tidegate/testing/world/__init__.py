"""Virtual time, random choices, storage and faults of a simulation, all determined by one seed."""
