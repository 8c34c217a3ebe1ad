"""Text as rows: CSV, JSON and plain lines, with a reason for each record that is no row."""
