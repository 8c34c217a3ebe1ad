"""Event time: the generation of watermarks from timestamps, and the treatment of late rows."""
