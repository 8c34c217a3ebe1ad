"""Sources and sinks: their contracts, formats, and one module or folder for each system."""
