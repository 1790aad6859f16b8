"""Many runs: comparisons, sweeps, replications, and what may be concluded from them."""
