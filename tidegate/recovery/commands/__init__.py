"""The command line for what is stored: what its commands do, and how they print what they have found."""
