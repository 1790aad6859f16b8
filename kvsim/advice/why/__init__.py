"""Why requests are slow, and what to try."""
