"""From keys to slots: an index for keys that fit into a word, and one for bytes."""
