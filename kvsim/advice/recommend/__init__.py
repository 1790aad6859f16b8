"""Which policy and settings serve given traffic, and what to type."""
