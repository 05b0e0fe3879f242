"""Whole runs of one rank on the device: one in one go, and one that is stopped among the updates of a step."""

import gc
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.gpu.records import RunFigures
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
from verl_slurm.config.slurm_section import SlurmConfig
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.compare import compare
from verl_slurm.trainer.setup import build_loop
from verl_slurm.trainer.state.position import StepShape
from verl_slurm.wire.client import NoDaemon
from verl_slurm.wire.messages import FromRank, Progress, RankSaved, SaveRequest, Stopped

_STEPS = 4
Precision = Literal["none", "bfloat16"]
DTYPES: dict[Precision, str] = {"none": "float32", "bfloat16": "bfloat16"}


@dataclass
class Line(NoDaemon):
    """The daemon's place: asks for a stop at one safe point, and looks at the clock."""

    stop_at: int | None = None
    rows: list[dict[str, float]] = field(default_factory=list)
    saved: list[RankSaved] = field(default_factory=list)
    first_poll: float = 0.0
    asked: float = 0.0
    stopped: float = 0.0
    polls: int = 0

    def send(self, message: FromRank) -> None:
        if isinstance(message, Progress) and "step_s" in message.metrics:
            self.rows.append(message.metrics)
        elif isinstance(message, RankSaved):
            self.saved.append(message)
        elif isinstance(message, Stopped):
            self.stopped = time.perf_counter()

    def request(self) -> SaveRequest | None:
        number, self.polls = self.polls, self.polls + 1
        self.first_poll = self.first_poll or time.perf_counter()
        if number != self.stop_at:
            return None
        self.asked = time.perf_counter()
        return SaveRequest(request_id=1, stop=True)


def build_wide_model(tiny: Path, directory: Path, *, width: int, layers: int) -> int:
    """A model of the quickstart's kind and tokenizer, as large as asked, untrained; how many parameters it has."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape: Any = Qwen2Config.from_pretrained(str(tiny))
    heads = max(width // 64, 1)
    shape.update(
        {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": layers,
            "layer_types": ["full_attention"] * layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": width // heads,
        }
    )
    shutil.copytree(tiny, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(shape)  # type: ignore[no-untyped-call]
    model.save_pretrained(str(directory))
    return sum(parameter.numel() for parameter in model.parameters())


def make_config(root: Path, model: Path, data: Path, device: str, precision: Precision) -> RunConfig:
    """GRPO with the arithmetic rule: 64 responses a step, four updates."""
    return RunConfig(
        name=root.name,
        run_dir=str(root),
        model=ModelConfig(path=str(model)),
        data=DataConfig(root=str(data)),
        rollout=RolloutConfig(micro_batch_size_per_device=32, max_new_tokens=10, samples_per_prompt=4),
        train=TrainConfig(
            algorithm="grpo",
            steps=_STEPS,
            batch_size_per_device=64,
            mini_batch_size_per_device=32,
            micro_batch_size_per_device=32,
            kl_in="loss",
            entropy_coef=0.01,  # an untrained model gets no reward, and would learn nothing from it
        ),
        distributed=DistributedConfig(
            dp_size=1,
            nodes=1,
            device="cuda" if device == "cuda" else "cpu",
            mixed_precision=precision,
        ),
        # Nothing is saved but what is asked for, and the end.
        checkpoint=CheckpointConfig(every_steps=1000, runtime_every_steps=1000, store_frozen=False),
        slurm=SlurmConfig(gpus_per_node=int(device == "cuda")),
    )


def measure_runs(configs: Sequence[RunConfig], device: torch.device, ranks: Collective) -> RunFigures:
    """`configs`: the same run twice, in two directories, which are removed behind it."""
    whole, broken = configs
    undisturbed = _life(whole, device, ranks, Line())
    shape = StepShape.of(broken)
    one = shape.generations + shape.scores + 1 + shape.updates
    stopped = _life(broken, device, ranks, Line(stop_at=2 * one - shape.updates // 2))
    (save,) = stopped.saved
    if not undisturbed.rows[-1]["kl"]:
        raise RuntimeError("nothing was learned, so that both ends are alike would say nothing")
    began = time.perf_counter()
    resumed = _life(broken, device, ranks, Line(), resume=save.name)
    one_go, resumed_end = (RunPaths(config.run_dir).checkpoint(_STEPS) for config in configs)
    same = compare(one_go, resumed_end).same
    for config in configs:
        shutil.rmtree(config.run_dir)

    def median(name: str) -> float:
        return statistics.median(row[name] for row in undisturbed.rows[1:])

    return RunFigures(
        precision="float32" if broken.distributed.mixed_precision == "none" else "bfloat16",
        state_gib=save.num_bytes / 2**30,
        step_s=median("step_s"),
        generate_s=median("generate_s"),
        score_s=median("score_s"),
        update_s=median("update_s"),
        emergency_s=stopped.stopped - stopped.asked,
        resume_s=resumed.first_poll - began,
        same_bits=same,
    )


def _life(config: RunConfig, device: torch.device, ranks: Collective, line: Line, resume: str = "") -> Line:
    paths = RunPaths(private_dir(Path(config.run_dir)))
    write_file(paths.run_yaml, dump(config))
    attempt = take_attempt(paths, job_id="benchmark", restart=0).attempt
    build_loop(config, paths, attempt=attempt, resume=resume, device=device, ranks=ranks, line=line).run()
    gc.collect()  # modules and their hooks know each other; the next life needs their memory
    return line
