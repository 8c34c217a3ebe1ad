"""What a coordinator is told, and what it asks for."""
