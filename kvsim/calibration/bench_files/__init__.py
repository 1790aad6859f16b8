"""Files of benchmarks that users already have, read as what was timed and on what."""
