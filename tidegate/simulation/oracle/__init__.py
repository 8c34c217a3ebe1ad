"""What watches a simulated job from outside, and which invariants it holds the job to."""
