"""GRPO and PPO of verl on two nodes, interrupted again and again at random moments, end with the bits of an undisturbed
run, and what was recorded is sampled once.

`VERL_SLURM_CAMPAIGN=25`: so many interruptions. The seed is printed; `VERL_SLURM_SEED=...` repeats the choices.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

pytest.importorskip("verl", reason="needs verl: make verl")

from tests.harness import LiveRun
from tests.slurm_cluster.verl_runs import PATIENCE_S, end, make_run, one, steps
from tests.verl.grpo import make_prompts
from tests.verl.same import differences
from tests.verl.tiny import make_critic, make_model
from verl_slurm.runtime_state.rollout_records import session_seed
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import fail_node, preempt, restore_node

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.torch,
    pytest.mark.verl,
    pytest.mark.soak,
    pytest.mark.timeout(4 * 3600),
]

SESSIONS = 32  # 8 prompts a step, 4 responses of each


def _struck(word: str) -> Callable[[LiveRun, DevCluster], None]:
    def strike(run: LiveRun, cluster: DevCluster) -> None:
        del cluster
        one(run, word).kill()

    return strike


def _preempted(run: LiveRun, cluster: DevCluster) -> None:
    preempt(cluster, int(run.job_id), hold_s=1)


def _node_lost(run: LiveRun, cluster: DevCluster) -> None:
    # One of those that it has now: a job that was requeued may have others.
    nodes = run.slurm("scontrol", "show", "hostnames", run.facts().node_list or "").split()
    lost = random.Random(len(run.events())).choice(nodes)
    fail_node(cluster, lost)
    try:
        run.wait_event("started", after=len(run.events()), timeout_s=PATIENCE_S)
    finally:
        restore_node(cluster, lost)


WAYS: dict[str, Callable[[LiveRun, DevCluster], None]] = {
    "preemption": _preempted,
    "worker": _struck("LedgerWorker"),
    "engine": _struck("Sampler"),
    "trainer rank": _struck("WorkerDict"),
    "driver": _struck("TaskRunner"),
    "node": _node_lost,
}


def _sampled(path: Path) -> list[tuple[int, tuple[int, ...]]]:
    """Seed and tokens of each response that an engine has finished."""
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    return [(line[1], tuple(line[2])) for line in lines]


def _finished(run: LiveRun) -> bool:
    ended = run.events("ended")
    return bool(ended) and ended[-1]["exit_code"] == 0


def _interrupt(
    run: LiveRun, cluster: DevCluster, log: Path, dice: random.Random, wanted: int
) -> tuple[Counter[str], list[float]]:
    """Strikes the run so many times, each time after it has begun to train again; returns how often in each way, and
    when."""
    done: Counter[str] = Counter()
    strikes: list[float] = []
    trained = 0
    while done.total() < wanted:
        run.wait(lambda trained=trained: len(run.events("training")) > trained or _finished(run), PATIENCE_S)
        # The random moment itself: while a step is sampled, updated or saved. Not before there is something new, or the
        # run would be given up.
        enough = len(_sampled(log)) + dice.randint(1, SESSIONS // 2)
        deadline = time.monotonic() + PATIENCE_S
        # Polls: no event tells of a line in an engine's log.
        while len(_sampled(log)) < enough and not _finished(run):
            assert time.monotonic() < deadline, run.story()
            time.sleep(0.1)
        time.sleep(dice.uniform(0.0, 3.0))
        if _finished(run):
            break
        way = dice.choice(sorted(WAYS))
        print(f"  {done.total() + 1:3} {way:14} step {run.status().get('step')}", flush=True)
        trained = len(run.events("training"))
        strikes.append(time.time())
        WAYS[way](run, cluster)
        done[way] += 1
    return done, strikes


def _require_every_step(run: LiveRun, total: int) -> None:
    # A step that is saved and then struck before verl has put its numbers together has no row.
    saved = {int(event["name"].removeprefix("step_")) for event in run.events("saved")}
    assert set(steps(run)) | saved == set(range(1, total + 1))


def _campaign(wanted: int, total: int) -> random.Random:
    seed = int(os.environ.get("VERL_SLURM_SEED") or 20261125)
    print(f"\ncampaign of {wanted} interruptions in {total} steps, VERL_SLURM_SEED={seed}")
    return random.Random(seed)


_UNRECORDED_S = 1.0
"""From a response that an engine has finished to its record, on two busy cores: then it outlives any kill."""

_ENDING_S = 15.0
"""From a strike to the end of the last engine."""


def _require_sampled_once(log: Path, strikes: list[float]) -> None:
    """No response is sampled twice, but one that an engine had finished a moment before a kill, so that no worker could
    record it."""
    lines = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    finished: dict[int, list[float]] = {}
    for _, session, _, at in lines:
        finished.setdefault(session, []).append(at)
    again = {session: times for session, times in finished.items() if len(times) > 1}
    print(
        f"  {len(finished)} responses, {len(again)} of them finished in an engine at a kill and sampled again"
    )
    for session, times in again.items():
        for at in sorted(times)[:-1]:
            before = [strike - at for strike in strikes]
            assert any(-_ENDING_S < s < _UNRECORDED_S for s in before), (
                f"{session}: seconds before kills: {before}"
            )


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_run_interrupted_at_random_moments_ends_with_the_bits_of_its_twin(
    cluster: DevCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    wanted = int(os.environ.get("VERL_SLURM_CAMPAIGN") or 25)
    total = max(4, wanted)
    dice = _campaign(wanted, total)
    inputs = make_model(tmp_path / "model"), make_prompts(tmp_path / "sums.parquet", max(64, 8 * total))
    critic = make_critic(tmp_path / "critic", inputs[0]) if algorithm == "ppo" else None
    rollout = "verl.actor_rollout_ref.rollout"
    said = [f"{rollout}.seed=7", f"{rollout}.full_determinism=true", "checkpoint.every_steps=1"]
    done, strikes, runs = Counter[str](), list[float](), dict[str, LiveRun]()
    for name in ("twin", "run"):
        log = tmp_path / f"{name}.sampled"
        monkeypatch.setenv("VERL_TEST_SAMPLED", str(log))
        monkeypatch.setenv("VERL_TEST_STAGGER_S", "0.5" if name == "run" else "0")
        run = runs[name] = make_run(cluster, inputs, tmp_path / name, monkeypatch, total, critic)
        run.argv += said
        run.submit()
        try:
            if name == "run":
                done, strikes = _interrupt(run, cluster, log, dice, wanted)
            run.wait_end(timeout_s=PATIENCE_S)
        finally:
            end(run)
    print(f"  {dict(done)}")
    assert done.total() >= wanted, "the run was over before: give it more steps"
    run, twin = runs["run"], runs["twin"]
    _require_every_step(run, total)
    places = [each.paths.checkpoint(total) / f"global_step_{total}" for each in (run, twin)]
    # verl's GRPO never seeds the generators of its ranks, and draws nothing from them.
    roles = ("actor", "critic") if critic else ("actor",)
    found = [one for role in roles for one in differences(*(place / role for place in places))]
    assert [one for one in found if ".rng." not in one] == []
    assert (places[0] / "data.pt").read_bytes() == (places[1] / "data.pt").read_bytes()
    expected = {session_seed(7, at, session) for at in range(8 * total) for session in range(4)}
    tokens = {}
    for name in runs:
        for session, sampled in _sampled(tmp_path / f"{name}.sampled"):
            assert tokens.setdefault(session, sampled) == sampled, "the same response, whenever it is sampled"
    assert set(tokens) == expected
    _require_sampled_once(tmp_path / "run.sampled", strikes)


def test_a_run_that_filters_groups_gives_no_prompt_out_twice_whatever_interrupts_it(
    cluster: DevCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = int(os.environ.get("VERL_SLURM_CAMPAIGN") or 5)
    total = max(4, wanted)
    dice = _campaign(wanted, total)
    prompts = make_prompts(tmp_path / "sums.parquet", 64 * total)
    reward = Path(__file__).parents[1] / "verl" / "seldom_reward.py"
    monkeypatch.setenv("VERL_TEST_SAMPLED", str(tmp_path / "sampled"))
    monkeypatch.setenv("VERL_TEST_STAGGER_S", "0.1")
    run = make_run(cluster, (make_model(tmp_path / "model"), prompts), tmp_path, monkeypatch, total)
    run.argv += [
        "verl.actor_rollout_ref.rollout.seed=7",
        "verl.actor_rollout_ref.rollout.full_determinism=true",
        "checkpoint.every_steps=1",
        f"verl.reward.custom_reward_function.path={reward}",
        "verl.algorithm.filter_groups.enable=true",
        "verl.algorithm.filter_groups.metric=reward",
        "verl.data.gen_batch_size=2",
        f"verl.trainer.rollout_data_dir={tmp_path / 'trained'}",
    ]
    run.submit()
    try:
        done, strikes = _interrupt(run, cluster, tmp_path / "sampled", dice, wanted)
        run.wait_end(timeout_s=PATIENCE_S)
    finally:
        end(run)
    print(f"  {dict(done)}")
    assert done.total() >= wanted, "the run was over before: give it more steps"
    _require_every_step(run, total)
    trained = Counter[str]()
    # verl writes one for each step, behind the save. One that was struck in between has none, and a restart that begins
    # behind it.
    told = list((tmp_path / "trained").iterdir())
    missing = set(range(1, total + 1)) - {int(file.stem) for file in told}
    resumed = {
        int(event["resume"].removeprefix("step_")) for event in run.events("restart") if event.get("resume")
    }
    assert missing <= resumed
    for file in told:
        trained += Counter(msgspec.json.decode(line)["input"] for line in file.read_bytes().splitlines())
    assert trained.total() == SESSIONS * len(told)
    # Equal sums are equal prompts.
    rows = Counter(row[0]["content"] for row in pq.read_table(prompts)["prompt"].to_pylist())
    for text, times in trained.items():
        row = max((row for row in rows if row in text), key=len)
        assert times <= 4 * rows[row], "a prompt is trained with once"
    given = {session for session, _ in _sampled(tmp_path / "sampled")}
    sessions = {session_seed(7, at, session): at for at in range(64 * total) for session in range(4)}
    places = sorted({sessions[session] for session in given})
    assert places == list(range(len(places))), (
        "prompts are given out in the order of the data, and none is left out"
    )
    assert len(given) == 4 * len(places)
    left = len(places) - 8 * total
    print(f"  {len(places)} prompts were given out: {left} of them filtered or left over")
    assert left > 0
    _require_sampled_once(tmp_path / "sampled", strikes)
