"""One run: arrivals, server, schedulers, backend, and what is recorded of it."""
