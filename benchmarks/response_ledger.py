"""What it costs to keep verl's responses: trajectories a second of one process, and the time to find them again.

What an engine pays for logging the tokens of unfinished responses is measured with it, in CPU.

    python benchmarks/response_ledger.py [--responses 512] [--tokens 1000] [--restored 50000] [--directory DIR] [--json]

One process records that many responses at once, as a worker of verl's does at the end of a step. Each is durable when
it counts. Tokens are random numbers of 17 bits, which compress worse than a model's. `restored` records of few tokens
are found again by an index, as at a start.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np

from verl_slurm.base.files import private_dir
from verl_slurm.base.kernel_facts import file_system
from verl_slurm.base.paths import RunPaths
from verl_slurm.runtime_state.ledger import Index
from verl_slurm.runtime_state.rollout_records import Responses, RolloutLedger
from verl_slurm.runtime_state.token_log import Call, TokenLog, token_paths

_SESSIONS = 8
_KINDS = 64
"""Different responses that are made; making one takes longer than recording it."""
_DIGEST = "0" * 64
_STEPS_A_WRITE = 10
"""Of an engine that gives each response 40 tokens a second; the log is written four times a second."""


def response(tokens: int, draw: np.random.Generator) -> dict[str, Any]:
    """Returns the fields of one output of verl's single-turn agent."""
    return {
        "prompt_ids": draw.integers(0, 150_000, 100).tolist(),
        "response_ids": draw.integers(0, 150_000, tokens).tolist(),
        "response_mask": [1] * tokens,
        "response_logprobs": (-draw.random(tokens, dtype=np.float32)).tolist(),
        "reward_score": 0.5,
        "num_turns": 2,
        "metrics": {"generate_sequences": 1.25, "tool_calls": 0.0, "compute_score": 0.0, "num_preempted": -1},
        "extra_fields": {
            "turn_scores": [],
            "tool_rewards": [],
            "min_global_steps": 3,
            "max_global_steps": 3,
            "reward_extra_info": {"acc": 1.0},
        },
    }


def record(root: Path, responses: int, tokens: int) -> dict[str, float]:
    """Records all of them at once; returns seconds, and CPU microseconds and bytes of one."""
    draw = np.random.default_rng(0)
    made = [response(tokens, draw) for _ in range(min(_KINDS, responses))]
    paths = RunPaths(root)
    ledger = RolloutLedger(paths, 1, 0)

    async def all_of_them() -> None:
        calls = (
            ledger.record(number // _SESSIONS, number % _SESSIONS, [made[number % len(made)]], _DIGEST)
            for number in range(responses)
        )
        await asyncio.gather(*calls)

    began, cpu = time.perf_counter(), time.process_time()
    asyncio.run(all_of_them())
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    ledger.close()
    assert ledger.recorded == responses, ledger.news()
    size = paths.ledger_segment(1, 0).stat().st_size
    return {"seconds": seconds, "cpu_us": cpu_s / responses * 1e6, "bytes": size / responses}


def log_tokens(root: Path, responses: int, tokens: int) -> dict[str, float]:
    """Logs so many tokens of each response, one a step of the engine. Returns the CPU in ns and the bytes of one."""
    log = TokenLog(RunPaths(root), 1, 0, every_s=3600.0)
    calls = [
        Call(number // _SESSIONS, number % _SESSIONS, 0, 100, _DIGEST[:16]) for number in range(responses)
    ]
    draw = np.random.default_rng(0)
    ids = draw.integers(0, 150_000, (tokens, responses)).tolist()
    log_probs = (-draw.random((tokens, responses), dtype=np.float32)).tolist()
    cpu = time.process_time()
    for step in range(tokens):
        for call, token, log_prob in zip(calls, ids[step], log_probs[step], strict=True):
            log.add(call, step, [token], [log_prob], version=3)
        if step % _STEPS_A_WRITE == 0:
            log.write()
    log.write()
    spent = time.process_time() - cpu
    log.close()
    size = token_paths(RunPaths(root)).ledger_segment(1, 0).stat().st_size
    return {"token_cpu_ns": spent / responses / tokens * 1e9, "token_bytes": size / responses / tokens}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--responses", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--restored", type=int, default=50_000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where to write; default: the disk of temporary files")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        runs = [
            record(private_dir(Path(place, f"run-{number}")), options.responses, options.tokens)
            for number in range(options.repetitions)
        ]
        median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        logged = log_tokens(private_dir(Path(place, "tokens")), options.responses, options.tokens)
        record(private_dir(Path(place, "restored")), options.restored, 8)
        began = time.perf_counter()
        found = len(Index(RunPaths(Path(place, "restored")), Responses))
        restore_s = time.perf_counter() - began
        medium = file_system(Path(place))
    assert found == options.restored
    per_s = options.responses / median["seconds"]
    if options.json:
        print(json.dumps({"per_s": per_s, "restore_s": restore_s, "medium": medium, **median, **logged}))
        return
    print(
        f"{options.responses} responses of {options.tokens} tokens on {medium}, median of {options.repetitions}: "
        f"{per_s:.0f} a second, {median['cpu_us']:.0f} us of CPU and {median['bytes']:.0f} bytes each\n"
        f"{found} records found again: {restore_s:.2f} s\n"
        f"a token of an unfinished response: {logged['token_cpu_ns']:.0f} ns of CPU, {logged['token_bytes']:.1f} bytes"
    )


if __name__ == "__main__":
    main()
