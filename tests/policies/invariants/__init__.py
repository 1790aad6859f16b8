"""A stateful machine that checks what every policy owes its engine; see ``shadow.py``."""
