"""What a checkpoint holds: operators, states and rows, and how two checkpoints differ."""
