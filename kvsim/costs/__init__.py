"""What a step costs in seconds: machine profiles, the price of a pass, and fits to measurements."""
