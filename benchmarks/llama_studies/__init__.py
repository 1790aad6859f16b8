"""Studies of the real llama.cpp: what holes, defragmentation and K-shifts cost on this machine.

Nothing is imported here: the process that is measured (``timing``) is to stay small.
"""
