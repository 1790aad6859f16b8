"""The outside world: live and recorded engines, to be recorded, replayed and validated against."""
