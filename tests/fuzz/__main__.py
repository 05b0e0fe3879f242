"""`make fuzz N=1000000`, or: python -m tests.fuzz [--inputs N] [--seed S] [--target NAME] [--only NUMBER]."""

import argparse
import os
import random
import sys
import time

from tests.fuzz.engine import input_of, run
from tests.fuzz.pool import run_all, shares
from tests.fuzz.table import TARGETS
from tests.fuzz.target import Target


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="over all targets")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--target", choices=[target.name for target in TARGETS])
    parser.add_argument("--only", type=int, help="this input of the target, with its traceback")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(argv)
    chosen = [target for target in TARGETS if options.target in (None, target.name)]
    if options.only is not None:
        return _again(chosen[0], options.seed, options.only)
    counts = {chosen[0]: options.inputs} if options.target else shares(options.inputs)
    print(f"seed {options.seed}: {sum(counts.values())} inputs for {len(counts)} parsers", flush=True)
    began = time.monotonic()
    outcomes = run_all(counts, options.seed, options.jobs)
    if outcomes is None:
        return 1
    for target, outcome in outcomes.items():
        print(f"{outcome.inputs:>9}  {outcome.taken:>8} taken  {len(outcome.findings)} findings  {target}")
    findings = [finding for outcome in outcomes.values() for finding in outcome.findings]
    for finding in findings:
        print(f"\n{finding.place}\n  {finding.what}\n  again: {finding.command()}")
    inputs = sum(outcome.inputs for outcome in outcomes.values())
    print(
        f"\n{inputs} inputs in {time.monotonic() - began:.0f} s, seed {options.seed}: {len(findings)} findings"
    )
    return 1 if findings else 0


def _again(target: Target, seed: int, number: int) -> int:
    data = input_of(target, seed, number)
    print(f"{len(data)} bytes: {data[:2000]!r}")
    outcome = run(target, seed, range(number, number + 1))
    for finding in outcome.findings:
        print(finding.what, finding.trace, sep="\n")
    return 1 if outcome.findings else 0


if __name__ == "__main__":
    sys.exit(main())
