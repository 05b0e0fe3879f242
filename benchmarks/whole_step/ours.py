"""One rank of this project's trainer, as `verl_slurm.trainer` builds it, with a gate in the daemon's place.

`python -m benchmarks.whole_step.ours SETTINGS SOCKET`. All that a run does at every step is on: the ledger (on disk,
fsync included), the counted noise of the sampler, deterministic kernels, the comparison of the sampler's log
probabilities with the actor's, TensorBoard and `steps.jsonl`. No step that is measured saves a checkpoint.
"""

import os
import sys
from pathlib import Path

from benchmarks.whole_step.gate import Gate, Said, Settings
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.load import dump
from verl_slurm.config.schema import (
    CheckpointConfig,
    DataConfig,
    DistributedConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from verl_slurm.wire.client import NoDaemon
from verl_slurm.wire.messages import FromRank, Progress


def config(given: Settings) -> RunConfig:
    """The run that `given` describes: everything else is the default, as in `configs/quickstart_grpo.yaml`."""
    return RunConfig(
        name="step",
        run_dir=given.directory,
        model=ModelConfig(path=given.model, reward="rule:arithmetic", dtype="float32"),
        data=DataConfig(root=given.data, max_prompt_tokens=given.prompt_tokens, shuffle=False),
        rollout=RolloutConfig(
            micro_batch_size_per_device=given.piece,
            samples_per_prompt=given.group,
            max_new_tokens=given.max_new_tokens,
            temperature=given.temperature,
        ),
        train=TrainConfig(
            algorithm="grpo",
            steps=given.steps,
            batch_size_per_device=given.responses,
            mini_batch_size_per_device=given.mini,
            micro_batch_size_per_device=given.mini,
            ppo_epochs=1,
            actor_lr=given.learning_rate,
            clip_ratio=given.clip,
            kl_in="loss",
            kl_controller="fixed",
            kl_coef=given.beta,
        ),
        distributed=DistributedConfig(
            dp_size=given.ranks, nodes=1, device="cpu", threads_per_rank=given.threads
        ),
        checkpoint=CheckpointConfig(every_steps=10**6, runtime_every_steps=10**6),
    )


def prepare(given: Settings) -> None:
    """Make the run's directory and take its attempt, once, before the ranks. Called by:
    benchmarks.tokens_per_second."""
    paths = RunPaths(Path(given.directory))
    private_dir(paths.root)
    write_file(paths.run_yaml, dump(config(given)))
    assert take_attempt(paths, job_id="benchmark", restart=0).attempt == 1


class _GateLine(NoDaemon):
    """Hears of the end of each step, and lets nobody go on before they are told to."""

    def __init__(self, gate: Gate, rank: int, responses: int) -> None:
        self._gate, self._rank, self._responses = gate, rank, responses

    def send(self, message: FromRank) -> None:
        if not (isinstance(message, Progress) and message.phase == "step_end" and message.metrics):
            return
        row = message.metrics  # of all ranks; so the first one answers for all
        self._gate.wait(
            Said(
                tokens=round(row["response_tokens"] * self._responses) if self._rank == 0 else 0,
                generate_s=row["generate_s"],
                score_s=row["score_s"],
                update_s=row["update_s"],
                reward=row["reward"],
            )
        )


def main(given: Settings, socket: Path) -> None:
    from verl_slurm.trainer.place import Place, process_group
    from verl_slurm.trainer.setup import build_loop

    chosen, place = config(given), Place.from_environ(os.environ)
    line = _GateLine(Gate(socket), place.rank, given.responses * given.ranks)
    with process_group(chosen, place) as (device, ranks):
        build_loop(
            chosen,
            RunPaths(Path(given.directory)),
            attempt=1,
            resume="",
            device=device,
            ranks=ranks,
            line=line,
            local_rank=place.local_rank,
        ).run()


if __name__ == "__main__":
    os.umask(0o077)
    main(Settings.parse(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # torch 2.13 may abort at the interpreter's own end: trainer.__main__.run_and_leave
