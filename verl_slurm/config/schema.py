"""The configuration of a run: one frozen struct an owner, text under each field, unit in the name.

A login node checks the whole of it without torch. msgspec refuses unknown keys and wrong types and says
where (`$.train.steps`); `load.py` turns that into a `ConfigError` with the nearest known key.
"""

from typing import Annotated, Literal

import msgspec

from verl_slurm.config.guest import GuestConfig, VerlSection
from verl_slurm.config.observability import ObservabilityConfig
from verl_slurm.config.tiers import TierConfig

__all__ = [
    "Attention",
    "CheckpointConfig",
    "DaemonConfig",
    "DataConfig",
    "DistributedConfig",
    "EncryptionConfig",
    "ModelConfig",
    "RolloutConfig",
    "RunConfig",
    "SlurmConfig",
    "StepInterval",
    "TrainConfig",
]

Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0.0)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0.0)]


Attention = Literal["auto", "sdpa", "eager", "flash_attention_2"]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen, keyword-only, closed: the manner of every section."""


class ModelConfig(_Section, frozen=True):
    """Which models train, and which one rewards."""

    path: str = "builtin:tiny"
    """A Hugging Face model directory, or `builtin:tiny`: a small Qwen2 that the project builds (`builtin:tiny32`: one
    with heads of 32, which vLLM wants on a CPU)."""
    reward: str = "rule:arithmetic"
    """`rule:NAME`; `classifier:DIR` for a Hugging Face sequence classifier with one label; `python:MODULE:FUNCTION`
    or `python:FILE.py:FUNCTION` for a function of (prompts, responses, answers) that returns one float each
    (config/reward_spec.py). `verl-slurm update-reward` replaces it while the run goes on."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    attn_implementation: Attention = "auto"
    """What computes attention in the trained models and in rollouts by `hf`. `auto`: torch's scaled dot product (sdpa),
    and `eager` for a family that has none (docs/models.md). `flash_attention_2` needs GPUs, the package flash_attn and
    bfloat16. The model directory's config.json has no say in it."""


class DataConfig(_Section, frozen=True):
    """The prompts: a directory of JSON Lines, JSON, CSV, Parquet or Arrow files (docs/data.md)."""

    root: str = "builtin:arithmetic"
    """A directory, or `builtin:arithmetic`: a few thousand sums that the project builds."""
    files: str | None = None
    """Which files of it, as a glob relative to `root`, e.g. `data/train-*.parquet` or `**/*.jsonl`. null: the data
    files directly in it, where they are of one kind and one split."""
    limit: Positive | None = None
    """Only the first so many rows, in the order of the files. null: all."""
    prompt_key: str = "prompt"
    """The prompt: text, or a list of {role, content}. Dots lead into nested columns."""
    answer_key: str | None = "answer"
    """What the reward is given beside the response, e.g. `reward_model.ground_truth`. null: there are no answers."""
    chat_template: str = "auto"
    """For prompts that are lists of {role, content}. `auto`: the tokenizer's own template. `none`: refuse such prompts.
    A path: that Jinja template. Prompts that are text are used as they are."""
    max_prompt_tokens: Positive = 16
    shuffle: bool = True
    eval_root: str | None = None
    """Held-out prompts, a root of the same form (or `builtin:arithmetic`: the sums kept apart). What stands in both
    does not train."""
    eval_files: str | None = None
    """Which files of `eval_root`, as `files`."""
    eval_fraction: Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)] = 0.0
    """Instead: the share of the prompts of `root` that is held out, chosen by a hash of each prompt's text. They do not
    train, whether they are evaluated or not."""


class RolloutConfig(_Section, frozen=True):
    """How the policy is sampled."""

    engine: Literal["hf", "vllm"] = "hf"
    """`hf`: Hugging Face's `generate`, on a whole copy of the actor on every rank. `vllm`: vLLM, in the rank's own
    process (an extra: `pip install 'verl-slurm[vllm]'`, on CPUs `make vllm`)."""
    micro_batch_size_per_device: Positive = 16
    """Responses sampled at once on one rank. A safe point lies behind each such micro-batch."""
    samples_per_prompt: Positive = 1
    """Responses to one prompt, all in one micro-batch: GRPO's group, which needs at least 2 (16 to 64 are usual).
    The number of prompts in a batch is its size divided by this."""
    max_new_tokens: Positive = 6
    temperature: PositiveFloat = 1.0
    max_logprob_gap: PositiveFloat | None = None
    """Largest mean difference, over a step's tokens, of the log probabilities that the engine sampled with and those
    that the actor gives the same tokens (nats). Above it the run stops: the engine had other weights, or computes
    something else. null: 0.002 where both compute in float32, 0.02 in bfloat16 (trainer/rollout/sampler_gap.py)."""
    keep_samples: NonNegative = 16
    """Responses of each step whose text stays readable (`verl-slurm samples`): half the best, half the worst by reward,
    of those that data-parallel rank 0 sampled. 0: none."""
    tensor_parallel_size: Positive = 1
    """vllm: ranks, of one node, that sample together, each with its share of every layer."""
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0.0, le=0.95)] = 0.4
    """vllm: share of a GPU for its weights and caches; training needs the rest of the same GPU."""
    enforce_eager: bool = True
    """vllm: no CUDA graphs and no compiling: a faster start, and no compiler needed on the nodes."""


class TrainConfig(_Section, frozen=True):
    """PPO and GRPO. Symbols as in Schulman et al. 2017 (arXiv:1707.06347) and 2015 (GAE, arXiv:1506.02438), and in
    Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300)."""

    algorithm: Literal["ppo", "grpo"] = "ppo"
    """`ppo`: a critic is the baseline. `grpo`: the mean reward of a prompt's responses is, and there is no critic."""
    steps: Positive = 30
    batch_size_per_device: Positive = 64
    """Responses a rank samples for one step."""
    mini_batch_size_per_device: Positive = 32
    """Samples a rank uses for one optimizer update. A safe point lies behind each update."""
    micro_batch_size_per_device: Positive = 32
    """Samples in one forward and backward pass; gradients accumulate up to the mini-batch."""
    ppo_epochs: Positive = 2
    """Times that the updates go through a step's samples, with GRPO, too (its mu)."""
    actor_lr: PositiveFloat = 1e-3
    critic_lr: PositiveFloat = 1e-3
    lr_schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "constant"
    """What becomes of both rates behind the warm-up (trainer/objective/schedule.py). `linear` and `cosine` fall until
    the last step; `inverse_sqrt` falls as 1/sqrt(step), and needs no last step; `wsd` stays, and falls in the last
    `lr_decay_steps`."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up, in every schedule."""
    lr_decay_steps: NonNegative = 0
    """Of `wsd` alone: the steps at the end in which the rate falls."""
    lr_min_ratio: Fraction = 0.0
    """The floor, as a share of the rate: what a falling schedule ends at."""
    eval_every_steps: NonNegative = 0
    """Evaluate on the held-out prompts (`data.eval_root` or `data.eval_fraction`) behind every so many steps and behind
    the last. 0: never. It changes no number of the training."""
    eval_prompts: Positive = 256
    """At most so many held-out prompts, always the same."""
    eval_temperature: NonNegativeFloat = 0.0
    """0: greedy. Else sampled at this temperature, with noise of its own."""
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    clip_ratio: PositiveFloat = 0.2
    clip_ratio_high: PositiveFloat | None = None
    """The upper bound is 1 + this ("clip-higher", DAPO, arXiv:2503.14476, section 3.1). null: as `clip_ratio`."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """How the policy's loss is averaged over a mini-batch. `token_mean`: every token counts the same (DAPO, eq. 8).
    `sequence_mean`: every response does (DeepSeekMath, eq. 3). `fixed_length`: the sum over tokens, divided by
    responses x rollout.max_new_tokens, so that no response's length scales it (Dr. GRPO, arXiv:2503.20783)."""
    advantage_scale: Literal["std", "none"] = "std"
    """GRPO: divide by the standard deviation of the group's rewards, or not (Dr. GRPO)."""
    value_clip: PositiveFloat = 0.2
    gamma: Fraction = 1.0
    gae_lambda: Fraction = 0.95
    entropy_coef: NonNegativeFloat = 0.0
    kl_coef: NonNegativeFloat = 0.02
    """First coefficient of the KL penalty against the reference model."""
    kl_in: Literal["reward", "loss"] = "reward"
    """`reward`: the penalty is part of what is maximised (Ziegler et al. 2019, arXiv:1909.08593). `loss`: a term of the
    policy's loss with a gradient of its own (DeepSeekMath, eq. 3)."""
    kl_estimator: Literal["auto", "k1", "k3"] = "auto"
    """Of each token's KL (http://joschu.net/blog/kl-approx.html). `auto`: k1 in the reward, k3 in the loss, where k1
    would have no gradient on average."""
    kl_controller: Literal["adaptive", "fixed"] = "adaptive"
    """`adaptive`: the coefficient is steered to `kl_target`. `fixed`: it stays `kl_coef`."""
    kl_target: PositiveFloat = 0.1
    """The adaptive controller steers the mean KL of its window to this (nats a sample)."""
    kl_window: Positive = 8
    """Steps in the controller's window."""


class DistributedConfig(_Section, frozen=True):
    """The shape of the job."""

    dp_size: Positive = 2
    """Data-parallel ranks over all nodes; FSDP2 shards parameters, gradients and optimizer state over them. Sizes
    "per device" are those of one data-parallel rank, however many devices hold its model together."""
    tp_size: Positive = 1
    """Tensor-parallel ranks: heads and hidden units of every layer are dealt out to them. Divides the numbers of
    attention and of key-value heads. Best within one node."""
    pp_size: Positive = 1
    """Pipeline stages: contiguous layers on each, micro-batches in 1F1B order."""
    mixed_precision: Literal["none", "bfloat16"] = "none"
    """`bfloat16`: layers compute in bfloat16, while parameters, sums of gradients and AdamW's state stay float32. With
    `model.dtype: bfloat16` instead, all of them are bfloat16."""
    recompute: bool = False
    """Keep only what goes in and out of each layer, and compute the rest again in the backward pass: less memory,
    a third more time, the same numbers."""
    nodes: Positive = 2
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads_per_rank: NonNegative = 1
    """CPU threads of one rank (0: torch's choice). Bitwise resume needs the same number each time."""

    @property
    def world_size(self) -> int:
        return self.dp_size * self.tp_size * self.pp_size

    @property
    def axes(self) -> tuple[int, int, int]:
        """(dp, tp, pp)."""
        return (self.dp_size, self.tp_size, self.pp_size)

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nodes

    def ranks_on(self, node_rank: int) -> range:
        """The ranks of one node."""
        return range(node_rank * self.ranks_per_node, (node_rank + 1) * self.ranks_per_node)


class EncryptionConfig(_Section, frozen=True):
    """Where the key is that checkpoints and journals are encrypted and signed with; never the key itself."""

    key_file: str | None = None
    """An absolute path; `verl-slurm key new FILE` makes one. Every node must see it."""
    key_env: str | None = None
    """Instead: the name of a variable. Slurm keeps a job's environment, so a file is better."""
    old_key_files: list[str] = []
    """Former keys, to read what was written with them."""
    accept_unsigned: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")] | None = None
    """Digest of the one manifest without a signature that may be resumed from."""


class StepInterval(_Section, frozen=True):
    """One row of `checkpoint.intervals`: how often to save up to a step."""

    every: Positive
    until_step: Positive | None = None
    """The last step this row speaks for. The last row has none: it holds for the rest."""


class CheckpointConfig(_Section, frozen=True):
    """What is saved, when, how much of it stays, and where a run starts from.

    When it saves never changes what is computed. Besides the periodic saves there is one at the end, one when
    Slurm ends the job, and one whenever an operator asks.
    """

    cadence: Literal["fixed", "adaptive", "young_daly"] = "fixed"
    """`fixed`: `every_steps` and `runtime_every_steps`. `adaptive`: the `intervals`, halved while the loss is
    volatile. `young_daly`: from the measured cost of a save and the measured rate of interruptions that lost
    work, at least every `every_steps` (see checkpoint/decide/cadence.py)."""
    every_steps: Positive = 1000
    """Checkpoint state: models, optimizers, schedulers, RNG. With `young_daly` the longest interval."""
    runtime_every_steps: Positive = 500
    """Runtime state alone is journaled by the ledger at once; a whole save is forced this often too."""
    intervals: tuple[StepInterval, ...] = ()
    """For `adaptive`, e.g. [{until_step: 1000, every: 100}, {every: 500}]. Empty: the shorter of `every_steps`
    and `runtime_every_steps` throughout."""
    halve_when_volatile: bool = True
    """With `adaptive` and `young_daly`: half the interval while the policy or value loss is volatile."""
    min_every_steps: Positive = 1
    """No cadence but `fixed` and the `intervals` as written saves more often than this."""
    expected_mtbi_h: PositiveFloat = 24.0
    """For `young_daly`: hours between interruptions that lose work, believed before any are measured. It weighs
    as much as one interruption seen in that time."""
    resume_from: str | None = "auto"
    """`auto`: the newest checkpoint of this run that verifies. A path: that one (verl's own trainers
    unpickle theirs, so it must be of people you trust). null: from the start."""
    keep_last: Positive = 3
    """Checkpoints that stay, the newest. With 1, two stay all the same, because the newest is not relied upon
    before it has been read back; and while a save is written there is room needed for one more."""
    keep_every: NonNegative = 0
    """Besides, for ever: one in every so many steps, the first at or after each multiple. 0: none. Each takes its
    room for good: steps / keep_every checkpoints in the end."""
    keep_best: NonNegative = 0
    """Besides, the best so many by `best_metric`, of those that have it (whole steps, with that metric in their row).
    0: none. With a metric of the evaluation, a step that sets a new best is saved at once."""
    best_metric: str = "eval/reward"
    """Any number of a step's row: `eval/reward`, `reward`, `kl`, ... (`verl-slurm status RUN --json` shows a row)."""
    best_mode: Literal["max", "min"] = "max"
    components: tuple[Literal["actor", "critic"], ...] = ()
    """What a partial save holds, e.g. [actor], to evaluate or export while training goes on. A partial save can be
    exported; it can never be resumed from. So it comes besides the full saves, in RUN/partial, and replaces none of
    them; `keep_last`, `keep_every` and `keep_best` hold there, too. Empty: no partial saves."""
    include_optimizer: bool = False
    """A partial save holds the optimizer state too, that of all that trains. It makes it no more resumable."""
    partial_every_steps: NonNegative = 0
    """How often a partial save is made, in steps; where a full save is due as well, that one serves. 0: never."""
    store_frozen: bool = True
    """Keep a copy of the reference and the reward model in RUN/frozen, once, by content."""
    scrub_every_h: NonNegativeFloat = 24.0
    """The daemon reads each checkpoint back this often, one after the other. 0: never."""
    scrub_mb_per_s: PositiveFloat = 50.0
    """How fast it reads for that."""
    local_dir: str | None = None
    """A directory on each node's own disk (NVMe) for a second copy, written at the same time. With shared
    storage gone, training goes on with that copy alone, and the next start brings it home."""
    local_keep: Positive = 2
    """Second copies that stay on each node."""
    encryption: EncryptionConfig | None = None
    """null: nothing is encrypted or signed."""


class ContainerConfig(_Section, frozen=True):
    """The image that agents and ranks run in. The lead stays outside, where Slurm's commands are.

    The image needs the packages of this project in the versions outside; a run's own directories are mounted under
    their own names.
    """

    image: str
    """apptainer: a path to a .sif, or a URI; pyxis: what `srun --container-image` takes."""
    runtime: Literal["apptainer", "pyxis"] = "apptainer"
    python: str = "python3"
    """In the image."""
    binds: list[str] = []
    """Further directories that ranks need, absolute."""


class SlurmConfig(_Section, frozen=True):
    """What is asked of Slurm."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit_min: Positive = 60
    signal_lead_s: Annotated[int, msgspec.Meta(ge=10, le=65535)] = 120
    """How long before the time limit Slurm warns (`--signal=B:USR1@N`); a save must fit into it."""
    cpus_per_node: Positive = 1
    gpus_per_node: NonNegative = 0
    mem_mb_per_node: NonNegative = 0
    """0: the partition's default."""
    extra: dict[str, str | int | bool] = {}
    """Further sbatch options by their long names, e.g. {constraint: a100}."""
    successor: bool = True
    """Where Slurm may not requeue the job (--no-requeue, or the site's rule): queue another one that follows it."""
    expedite: Literal["auto", "never"] = "auto"
    """auto: `--requeue=expedite` where Slurm offers it: after a lost node the job comes back before all others."""
    container: ContainerConfig | None = None
    """null: ranks run in the environment that submits."""


class DaemonConfig(_Section, frozen=True):
    """How patient the daemon is."""

    save_margin_s: PositiveFloat = 3.0
    """An emergency save that is not verified this long before the deadline is given up: requeue first."""
    requeue_delay_s: Annotated[int, msgspec.Meta(ge=1, le=3600)] = 10
    """The requeued job may start this long after (Slurm's own delay is 120 s and more)."""
    crash_budget: NonNegative = 8
    """Restarts in place after a rank died, without a verified checkpoint in between, before asking for other nodes."""
    hang_budget: NonNegative = 2
    """The same after a hang."""
    node_budget: NonNegative = 2
    """The same after a node's agent was lost while Slurm still had the node."""
    avoid_node_s: NonNegative = 3600
    """So long a requeued job stays away from a node that alone was behind such failures; 0: it may come back to it."""
    hang_factor: Annotated[float, msgspec.Meta(ge=2.0)] = 5.0
    """A rank is hung when it needs so many times the longest that any rank has needed between two safe points."""
    hang_floor_s: PositiveFloat = 300.0
    """But not before so many seconds."""
    load_timeout_s: PositiveFloat = 1800.0
    """From a rank's first word to its first safe point: loading models, the first collective, replaying the ledger. And
    from the start of a save to the next safe point, or the end: training may wait there for storage."""
    backoff_s: NonNegativeFloat = 1.0
    """Wait before a restart in place; doubles with each start in a row that sampled nothing new."""
    no_progress_limit: Positive = 4
    """Starts without a newer verified checkpoint or rollout before the run is stopped with a report."""
    start_timeout_s: PositiveFloat = 300.0
    """From the start of the ranks to their first word."""


class RunConfig(_Section, frozen=True):
    """A whole run."""

    name: str = "run"
    run_dir: str = "runs/{name}"
    """Where everything of the run lives; on a file system that all its nodes see."""
    seed: NonNegative = 0
    deterministic: bool = True
    trainer: GuestConfig = GuestConfig()
    """`config/guest.py`."""
    verl: VerlSection = {}
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    distributed: DistributedConfig = DistributedConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    slurm: SlurmConfig = SlurmConfig()
    daemon: DaemonConfig = DaemonConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    """`config/observability.py`."""
    tiers: Annotated[tuple[TierConfig, ...], msgspec.Meta(max_length=8)] = ()
    """Where verified checkpoints move by themselves, nearest first, e.g. node NVMe, object store, archive."""
    tiers_every_min: Positive = 15
    """The daemon has the mover look this often, besides after every verified checkpoint."""

    @property
    def speakers(self) -> int:
        """Ranks that speak with the daemon: on Ray it is one alone, verl's driver."""
        return 1 if self.trainer.on_ray else self.distributed.world_size

    def speakers_on(self, node_rank: int) -> range:
        """Those of one node. Ray chooses where the driver runs, so each node listens for it."""
        return range(1) if self.trainer.on_ray else self.distributed.ranks_on(node_rank)
