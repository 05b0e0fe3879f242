"""Stands in for the daemon in tests of the command line: writes the events a lead writes, trains nothing."""
