"""Servers that run: what they say of themselves, what they are asked, and how long they take."""
