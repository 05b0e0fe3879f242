"""The ranks' half of a save: staging, commit, loading. Needs torch."""
