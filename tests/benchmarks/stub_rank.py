"""A rank of `benchmarks.tokens_per_second` that trains nothing; one that is not the first fails if it is told to."""

import os
import sys
from pathlib import Path

from benchmarks.whole_step.gate import Gate, Said, Settings

if __name__ == "__main__":
    given, gate = Settings.parse(sys.argv[1]), Gate(Path(sys.argv[2]))
    rank = int(os.environ.get("RANK", "0"))
    for step in range(given.steps):
        if given.model == "broken" and step and rank:
            sys.exit("no more")
        gate.wait(
            Said(tokens=10 + step + rank, generate_s=0.1 * (1 + rank), score_s=0.0, update_s=0.0, reward=rank)
        )
