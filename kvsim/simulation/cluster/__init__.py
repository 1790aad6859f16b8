"""Several servers behind a router."""
