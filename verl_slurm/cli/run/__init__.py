"""Commands for runs: start, follow, steer."""
