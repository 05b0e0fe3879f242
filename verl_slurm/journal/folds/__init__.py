"""What the events of a run add up to. Pure: no clock, no file."""
