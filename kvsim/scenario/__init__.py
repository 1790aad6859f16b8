"""Scenarios: their files and sections, and the workloads and scenarios that ship with the package."""
