"""Points that others measured on real servers and published, replayed as closed loops."""
