"""Measuring an engine on this machine, and fitting a machine profile to what was measured."""
