"""What holds for a job from its submission on: its spec, its limits, and the tables of what it can go through."""
