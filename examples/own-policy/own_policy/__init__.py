"""A policy for kvsim that takes the smallest free extent; an example of a package of one's own."""
