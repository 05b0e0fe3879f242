"""The fingerprint of a data set: taken, recorded for a run, and compared at each start."""
