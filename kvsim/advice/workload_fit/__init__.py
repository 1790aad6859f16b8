"""Generators fitted to request streams."""
