"""Measure an engine on this machine, and fit a machine profile to the measurements."""
