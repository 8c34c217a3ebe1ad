"""What a task machine is told, and what it asks for."""
