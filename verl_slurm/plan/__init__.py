"""Plans a run: simulates what saves, interruptions and waiting make of its allocation, and what a change would buy."""
