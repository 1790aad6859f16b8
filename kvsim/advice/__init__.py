"""Answers: settings to use, memory that is needed, causes of slow requests, models of a workload."""
