"""Takes the fingerprint of a data set, records it for a run, and compares it at each start."""
