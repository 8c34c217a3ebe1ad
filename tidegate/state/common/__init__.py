"""What all state backends share: their contract, their options, and columns in pages."""
