"""Recorded servers: what they were asked and when they answered, and what we predict of them."""
