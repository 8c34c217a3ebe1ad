"""DataFrames that only read files: their plan, and the source that reads these files without Spark."""
