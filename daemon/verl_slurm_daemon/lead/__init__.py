"""The lead: one per job. `decide.policy` decides, `effects` acts."""
