"""Profiles of devices from what others have measured and published."""
