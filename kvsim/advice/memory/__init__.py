"""Where memory goes: measured, planned, and by option of each engine."""
