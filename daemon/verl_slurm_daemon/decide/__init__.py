"""The decisions of the lead and the agents. Pure: no clock, no process, no file."""
