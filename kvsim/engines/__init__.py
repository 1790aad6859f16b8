"""Real engines: recording their runs, replaying recordings, and validating predictions against them."""
