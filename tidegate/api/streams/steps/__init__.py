"""Steps: from a stream to another one of its kind, with what is known of its columns, its changes and its slots."""
