"""The writer process beside each rank: hashes and writes. No torch."""
