"""What a snapshot may be built on: the layers of an earlier checkpoint, or those of a changelog."""
