"""Declares the configuration of a run: one frozen struct per owner, text under each field, the unit in its name.

A login node checks all of it without torch (`load.py`, `checks/`).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0.0)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0.0)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: frozen, keyword-only, closed."""


VerlSection = dict[str, Any]
"""verl's own Hydra keys, passed on unchanged. In a file they may be nested or dotted (`trainer.total_epochs: 2`); here
they are dotted. As in Hydra, `+` before a key adds one that verl's own configuration lacks."""


Attention = Literal["auto", "sdpa", "eager", "flash_attention_2"]
BUILTIN = "builtin:"
"""Prefix of the names of models and data that the project makes itself."""


class GuestConfig(Section, frozen=True):
    """Selects the training loop that runs.

    A *guest* is a loop outside this project: one of verl's own trainers, or a program of the user's.
    """

    backend: Literal["native", "verl", "command", "ray"] = "native"
    """`native`: our trainer, as `model`, `data`, `rollout` and `train` describe it. `verl`: the package `verl`,
    unpatched, as the section `verl` describes it. `command`: any program that calls `verl_slurm.run()`, on all ranks
    (docs/guests.md). `ray`: a program that drives Ray, once, on a Ray over all nodes of the job (docs/ray.md)."""
    entry: Literal["ppo", "sft"] = "ppo"
    """verl: `ppo` is `verl.trainer.main_ppo` on Ray (PPO, GRPO and the like), `sft` its SFT trainer."""
    command: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] = ()
    """command, ray: a Python file, or `-m` and a module, and its arguments, e.g. [train.py, --lr, "1e-4"]. With
    `command` it is started as torchrun would, on `distributed.dp_size` ranks over all nodes; with `ray` once, on the
    first node, and `distributed.dp_size` is the number of GPUs of the whole Ray. verl with entry ppo: the main of a
    recipe in the place of `verl.trainer.main_ppo`, e.g. [-m, recipe.main, --config-name, mine], which is given verl's
    settings. A relative file is resolved from the directory of the YAML."""

    @property
    def is_guest(self) -> bool:
        return self.backend != "native"

    @property
    def on_ray(self) -> bool:
        """Returns whether one process on the first node leads and Ray, instead of the agents, starts the others."""
        return self.backend == "ray" or (self.backend == "verl" and self.entry == "ppo")


class ModelConfig(Section, frozen=True):
    """Names the models that train and the reward."""

    path: str = "builtin:tiny"
    """A Hugging Face model directory, or `builtin:tiny`: a small Qwen2 that the project builds. `builtin:tiny32` has
    heads of 32, which vLLM needs on a CPU."""
    reward: str = "rule:arithmetic"
    """`rule:NAME`; `classifier:DIR` for a Hugging Face sequence classifier with one label; `python:MODULE:FUNCTION` or
    `python:FILE.py:FUNCTION` for a function of (prompts, responses, answers) that returns one float each
    (config/reward_spec.py). `verl-slurm update-reward` replaces the reward while the run goes on."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights in training and in checkpoints; `distributed.mixed_precision` is of the computation alone."""
    attn_implementation: Attention = "auto"
    """The attention implementation of the trained models and of rollouts by `hf`. `auto`: torch's scaled dot product
    (sdpa), or `eager` for a family without it (docs/models.md). `flash_attention_2` needs GPUs, the package flash_attn
    and bfloat16. The setting in the model directory's config.json is ignored."""


class DataConfig(Section, frozen=True):
    """The prompts: a directory of JSON Lines, JSON, CSV, Parquet or Arrow files (docs/data.md)."""

    root: str = "builtin:arithmetic"
    """A directory, or `builtin:arithmetic`: a few thousand sums that the project builds."""
    files: str | None = None
    """The data files, as a glob relative to `root`, e.g. `data/train-*.parquet` or `**/*.jsonl`. null: the data files
    directly in `root`, if they are of one kind and one split."""
    limit: Positive | None = None
    """Use the first so many rows, in the order of the files. null: all rows."""
    prompt_key: str = "prompt"
    """Column of the prompt: text, or a list of {role, content}. Dots lead into nested columns."""
    answer_key: str | None = "answer"
    """Column that the reward is given beside the response, e.g. `reward_model.ground_truth`. null: there are no
    answers."""
    chat_template: str = "auto"
    """For prompts that are lists of {role, content}. `auto`: the tokenizer's own template. `none`: refuse such prompts.
    A path: that Jinja template. Prompts that are text are used as they are."""
    max_prompt_tokens: Positive = 16
    """A longer prompt is refused, never cut."""
    shuffle: bool = True
    """Take the prompts in another order in each pass over the data, by `seed`. false: in the order of the files."""
    eval_root: str | None = None
    """Held-out prompts: a root of the same form, or `builtin:arithmetic` for the sums kept apart. A prompt that is in
    both roots does not train."""
    eval_files: str | None = None
    """The data files of `eval_root`, in the form of `files`."""
    eval_fraction: Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)] = 0.0
    """Instead of `eval_root`: the share of the prompts of `root` that is held out, chosen by a hash of each prompt's
    text. Held-out prompts do not train, whether they are evaluated or not."""


class RolloutConfig(Section, frozen=True):
    """Sets how the policy is sampled."""

    engine: Literal["hf", "vllm"] = "hf"
    """`hf`: as Hugging Face's `generate`, on a whole copy of the actor on every rank. `vllm`: vLLM, in the rank's own
    process (an extra: `pip install 'verl-slurm[vllm]'`, on CPUs `make vllm`)."""
    micro_batch_size_per_device: Positive = 16
    """Responses sampled at once on one rank. A safe point follows each such micro-batch."""
    samples_per_prompt: Positive = 1
    """Responses to one prompt, all in one micro-batch: GRPO's group, which needs at least 2 (16 to 64 are usual).
    The number of prompts in a batch is its size divided by this."""
    max_new_tokens: Positive = 6
    """Tokens of a response at most; prompt and response together have to fit into the model's positions."""
    temperature: PositiveFloat = 1.0
    """Of sampling in training: below 1 likely tokens become likelier. `train.eval_temperature` is the evaluation's."""
    max_logprob_gap: PositiveFloat | None = None
    """Largest mean difference (nats), over a step's tokens, between the log probabilities of the engine and those of
    the actor for the same tokens. Above it the run stops: the engine had other weights, or computes something else.
    null: 0.002 if both compute in float32, 0.02 in bfloat16 (trainer/rollout/engines.py)."""
    keep_samples: NonNegative = 16
    """Responses of each step whose text stays readable (`verl-slurm samples`): half the best and half the worst by
    reward, among those that data-parallel rank 0 sampled. 0: none."""
    tensor_parallel_size: Positive = 1
    """vllm: ranks of one node that sample together; each holds its share of every layer."""
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0.0, le=0.95)] = 0.4
    """vllm: share of a GPU for its weights and caches. Training needs the rest of the same GPU."""
    enforce_eager: bool = True
    """Use no CUDA graphs; vllm: and compile nothing. The start is faster, and the nodes need no compiler. `false`
    samples small models several times as fast on a GPU (docs/gpu.md), and rounds differently."""


class TrainConfig(Section, frozen=True):
    """Sets PPO and GRPO. Symbols follow Schulman et al. 2017 (arXiv:1707.06347) and 2015 (GAE, arXiv:1506.02438), and
    Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300)."""

    algorithm: Literal["ppo", "grpo"] = "ppo"
    """`ppo`: a critic is the baseline. `grpo`: the mean reward of a prompt's responses is the baseline, and there is no
    critic."""
    steps: Positive = 30
    """A step samples, scores and updates."""
    batch_size_per_device: Positive = 64
    """Responses that a rank samples for one step."""
    mini_batch_size_per_device: Positive = 32
    """Samples that a rank uses for one optimizer update. A safe point follows each update."""
    micro_batch_size_per_device: Positive = 32
    """Samples in one forward and backward pass; gradients accumulate up to the mini-batch."""
    ppo_epochs: Positive = 2
    """Passes of the updates over a step's samples, with PPO and with GRPO (its mu)."""
    actor_lr: PositiveFloat = 1e-3
    """Learning rate of the policy after the warm-up (`warmup_steps`)."""
    critic_lr: PositiveFloat = 1e-3
    """Likewise of the critic, which PPO alone has; see `actor_lr`."""
    lr_schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "constant"
    """Course of both learning rates after the warm-up (trainer/objective/optimizers.py). `linear` and `cosine` fall
    until the last step. `inverse_sqrt` falls as 1/sqrt(step) and needs no last step. `wsd` stays constant and falls in
    the last `lr_decay_steps`."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up, in every schedule."""
    lr_decay_steps: NonNegative = 0
    """`wsd` only: steps at the end in which the rate falls."""
    lr_min_ratio: Fraction = 0.0
    """Floor of a falling schedule, as a share of the rate."""
    eval_every_steps: NonNegative = 0
    """Evaluate on the held-out prompts (`data.eval_root` or `data.eval_fraction`) after every so many steps and after
    the last. 0: never. Evaluation changes no number of the training."""
    eval_prompts: Positive = 256
    """Largest number of held-out prompts. Every evaluation uses the same ones."""
    eval_temperature: NonNegativeFloat = 0.0
    """0: greedy. Otherwise responses are sampled at this temperature, from a random stream of the evaluation's own."""
    weight_decay: NonNegativeFloat = 0.0
    """Of AdamW, for policy and critic."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients of a larger norm are scaled down to it."""
    clip_ratio: PositiveFloat = 0.2
    """PPO's epsilon (Schulman et al. 2017, arXiv:1707.06347)."""
    clip_ratio_high: PositiveFloat | None = None
    """The upper bound is 1 + this ("clip-higher", DAPO, arXiv:2503.14476, section 3.1). null: as `clip_ratio`."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """How the policy's loss is averaged over a mini-batch. `token_mean`: every token counts the same (DAPO, eq. 8).
    `sequence_mean`: every response does (DeepSeekMath, eq. 3). `fixed_length`: the sum over tokens, divided by
    responses x rollout.max_new_tokens, so that no response's length scales it (Dr. GRPO, arXiv:2503.20783)."""
    advantage_scale: Literal["std", "none"] = "std"
    """GRPO: divide by the standard deviation of the group's rewards, or not (Dr. GRPO)."""
    value_clip: PositiveFloat = 0.2
    """How far from the old value a new one counts."""
    gamma: Fraction = 1.0
    """Discount of a reward per token."""
    gae_lambda: Fraction = 0.95
    """Of generalized advantage estimation (Schulman et al. 2015, arXiv:1506.02438)."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy in the policy's loss, which keeps responses varied. 0: it is not part of the loss."""
    kl_coef: NonNegativeFloat = 0.02
    """First coefficient of the KL penalty against the reference model."""
    kl_in: Literal["reward", "loss"] = "reward"
    """`reward`: the penalty is part of what is maximised (Ziegler et al. 2019, arXiv:1909.08593). `loss`: a term of the
    policy's loss with a gradient of its own (DeepSeekMath, eq. 3)."""
    kl_estimator: Literal["auto", "k1", "k3"] = "auto"
    """Estimator of each token's KL (http://joschu.net/blog/kl-approx.html). `auto`: k1 in the reward, and k3 in the
    loss, where k1 would have no gradient on average."""
    kl_target: PositiveFloat | None = 0.1
    """A controller steers the coefficient so that the mean KL of its window (nats a sample) becomes this. null: the
    coefficient stays `kl_coef`."""
    kl_window: Positive = 8
    """Steps in the controller's window."""


class DistributedConfig(Section, frozen=True):
    """Sets the shape of the job."""

    dp_size: Positive = 2
    """Data-parallel ranks over all `nodes`; FSDP2 shards parameters, gradients and optimizer state over them. Sizes
    "per device" are those of one data-parallel rank, however many devices hold its model together."""
    tp_size: Positive = 1
    """Tensor-parallel ranks, which share the heads and hidden units of every layer. Must divide the numbers of
    attention heads and of key-value heads. Works best within one node."""
    pp_size: Positive = 1
    """Pipeline stages: each holds contiguous layers and runs micro-batches in 1F1B order."""
    mixed_precision: Literal["none", "bfloat16"] = "none"
    """`bfloat16`: layers compute in bfloat16, while parameters, sums of gradients and AdamW's state stay float32. With
    `model.dtype: bfloat16` instead, all of them are bfloat16."""
    recompute: bool = False
    """Keep the inputs and outputs of each layer, and compute the rest again in the backward pass: less memory, a third
    more time, the same numbers."""
    nodes: Positive = 2
    """The ranks are spread over them evenly."""
    min_nodes: Positive | None = None
    """The fewest nodes to train on. Slurm may start the job with any number from this one to `nodes`, and a lost node
    that no spare one replaces leaves a smaller run. A step stays the same prompts in the same mini-batches; sums are
    made in another order. For the trainer here, verl with FSDP, and loops with `verl_slurm.run(any_ranks=True)`.
    null: `nodes`, always."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What ranks compute on. `auto`: cuda where there are GPUs (`slurm.gpus_per_node`), else cpu."""
    threads_per_rank: NonNegative = 1
    """CPU threads of one rank (0: torch's choice). Bitwise resume needs the same number at each start."""

    @property
    def world_size(self) -> int:
        return self.dp_size * self.tp_size * self.pp_size

    @property
    def axes(self) -> tuple[int, int, int]:
        """Returns (dp, tp, pp)."""
        return (self.dp_size, self.tp_size, self.pp_size)

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nodes

    def ranks_on(self, node_rank: int) -> range:
        """Returns the ranks of one node."""
        return range(node_rank * self.ranks_per_node, (node_rank + 1) * self.ranks_per_node)


class EncryptionConfig(Section, frozen=True):
    """Locates the key that encrypts and signs checkpoints and journals; never holds the key itself."""

    key_file: str | None = None
    """An absolute path that every node can read. `verl-slurm init --key FILE` makes a key."""
    key_env: str | None = None
    """Instead of `key_file`: the name of an environment variable. Slurm keeps a job's environment, so a file is safer.
    """
    old_key_files: list[str] = []
    """Former keys. They read what they encrypted or signed."""
    accept_unsigned: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")] | None = None
    """Digest of the one manifest without a signature that the run may resume from."""


class StepInterval(Section, frozen=True):
    """One row of `checkpoint.intervals`: the interval between saves up to a step."""

    every: Positive
    """Steps between two saves."""
    until_step: Positive | None = None
    """The last step of this row. The last row has none and holds for the rest."""


class CheckpointConfig(Section, frozen=True):
    """Sets what is saved, when, how many checkpoints stay, and where a run starts from.

    The time of a save never changes what is computed. The run also saves at its end, when Slurm ends the job, and
    whenever an operator asks.
    """

    cadence: Literal["fixed", "adaptive", "young_daly", "continuous"] = "fixed"
    """`fixed`: `every_steps` and `runtime_every_steps`. `adaptive`: the `intervals`, halved while the loss is volatile.
    `young_daly`: from the measured cost of a save and the measured rate of interruptions that lost work, at least every
    `every_steps`, halved likewise. `continuous`: as soon as the save before is durable, at least every `every_steps`
    (see checkpoint/decide/cadence.py)."""
    every_steps: Positive = 1000
    """Steps between saves of checkpoint state: models, optimizers, schedulers, RNG. With `young_daly` and
    `continuous`: the longest interval."""
    runtime_every_steps: Positive = 500
    """The ledger records runtime state at once. A whole save is also forced every so many steps."""
    intervals: tuple[StepInterval, ...] = ()
    """For `adaptive`, e.g. [{until_step: 1000, every: 100}, {every: 500}]. Empty: the shorter of `every_steps` and
    `runtime_every_steps` throughout."""
    min_every_steps: Positive = 1
    """Shortest interval between saves. `fixed`, and the `intervals` as written, may save more often."""
    expected_mtbi_h: PositiveFloat = 24.0
    """For `young_daly`: assumed hours between interruptions that lose work, before any are measured. The assumption
    weighs as much as one interruption seen in that time."""
    resume_from: str | None = "auto"
    """`auto`: the newest checkpoint of this run that verifies. A path: that checkpoint (verl's own trainers unpickle
    theirs, so use one from people you trust). null: from the start."""
    keep_last: Positive = 3
    """Newest checkpoints that stay. With 1, two stay: the newest is not relied upon before it has been read back. While
    a save is written, it needs room for one more."""
    keep_every: NonNegative = 0
    """Also keep one checkpoint in every so many steps permanently: the first at or after each multiple. 0: none. In the
    end steps / keep_every checkpoints take up room."""
    keep_best: NonNegative = 0
    """Also keep the best so many by `best_metric`, among those that have it (whole steps, with that metric in their
    row). 0: none. With a metric of the evaluation, a step that sets a new best is saved at once."""
    best_metric: str = "eval/reward"
    """Any number of a step's row: `eval/reward`, `reward`, `kl`, ... (`verl-slurm status RUN --json` shows a row)."""
    best_mode: Literal["max", "min"] = "max"
    """Whether the greatest or the smallest `best_metric` is the best."""
    components: tuple[Literal["actor", "critic"], ...] = ()
    """Models of a partial save, e.g. [actor], to evaluate or export while training goes on. A partial save can be
    exported and never resumed from. So it is made in addition to the full saves, in RUN/partial, and replaces none of
    them. `keep_last`, `keep_every` and `keep_best` apply there, too. Empty: no partial saves."""
    include_optimizer: bool = False
    """A partial save also holds the optimizer state of all models that train. It still cannot be resumed from."""
    partial_every_steps: NonNegative = 0
    """Steps between partial saves. Where a full save is due as well, the full save serves. 0: never."""
    store_frozen: bool = True
    """Store one copy of the reference and the reward model in RUN/frozen, by content."""
    scrub_every_h: NonNegativeFloat = 24.0
    """Hours between two readings of each checkpoint by the daemon, which reads them one after the other at 50 MB/s,
    faster if half of that time would not suffice for all. 0: never."""
    local_dir: str | None = None
    """A directory on each node's own disk (NVMe) for a second copy, written at the same time. If shared storage is
    gone, training goes on with that copy alone, and the next start copies it to shared storage. Ranks that start on
    that node again read their tensors from it. The newest two stay."""
    encryption: EncryptionConfig | None = None
    """null: nothing is encrypted or signed."""


class CodeConfig(Section, frozen=True):
    """Sets what `submit` copies into the run, so that every attempt runs the submitted code (docs/code.md)."""

    tree: str | None = "auto"
    """The directory that is copied. `auto`: the git work tree that holds the program (a file of `trainer.command`, of
    `model.reward` or of `verl`), without what git ignores; else the program's own directory. null: nothing is copied,
    and each attempt runs what lies there at that time."""
    include: tuple[str, ...] = ()
    """Further files that git ignores, as globs relative to the tree, e.g. ["build/**/*.so"]."""
    exclude: tuple[str, ...] = ()
    """Files and directories to leave out, as globs relative to the tree or for one name, e.g. ["*.ipynb", "assets"]."""
    max_mb: Positive = 100
    """A larger copy is refused: code is small, and a directory with data was probably not meant."""
    on_drift: Literal["report", "refuse"] = "report"
    """What happens if the Python packages of an attempt are not those of the submission. `report`: a warning in the
    journal. `refuse`: the run ends before its ranks start."""


_FILES = (".sif", ".sqsh", ".squashfs", ".simg")

Runtime = Literal["apptainer", "podman", "pyxis"]


class ContainerConfig(Section, frozen=True):
    """Names the image that ranks run in (docs/containers.md).

    Lead and agents stay outside, where Slurm's commands are; with pyxis, the agents are inside.
    """

    image: str
    """A file (.sif for apptainer, .sqsh for pyxis), or a name that ends with its digest: NAME@sha256:..."""
    digest: str | None = None
    """`sha256:` and the digest of the image's file. Each attempt checks it. null: submit records that of the file."""
    runtime: Runtime = "apptainer"
    """apptainer, podman: each agent starts one for its ranks. pyxis: srun does."""
    python: str = "python3"
    """The interpreter in the image."""
    binds: tuple[str, ...] = ()
    """Further directories that ranks need, as absolute paths, e.g. your home directory. They may be written to."""
    workdir: str = "/tmp"  # noqa: S108 - in the image, where it is private or the node's own
    """The directory in the image that the ranks start in."""
    extra_args: tuple[str, ...] = ()
    """Further options for the runtime: `apptainer exec`, `podman run`; for pyxis, `srun`."""

    @property
    def is_file(self) -> bool:
        """Returns whether the image is a file, and not a name in a registry or a store."""
        return "://" not in self.image and (
            self.image.startswith(("/", "./", "../", "~")) or self.image.endswith(_FILES)
        )


class SlurmConfig(Section, frozen=True):
    """Sets what the run asks of Slurm."""

    partition: str | None = None
    """null: Slurm's default one. Several, `a,b`: Slurm takes the one that can start the job first."""
    account: str | None = None
    """Account that pays for the job. null: your default one."""
    qos: str | None = None
    """Quality of service of the job. null: the account's default one."""
    time_limit_min: Positive = 60
    """Of one job; a run that needs longer is requeued before it ends."""
    signal_lead_s: Annotated[int, msgspec.Meta(ge=10, le=65535)] = 120
    """Seconds before the time limit at which Slurm warns (`--signal=B:USR1@N`); a save must fit into them."""
    cpus_per_node: Positive = 1
    """CPU cores that the job asks for on each node, for all of its ranks."""
    gpus_per_node: NonNegative = 0
    """GPUs that the job asks for on each node: one for each of its ranks (`distributed.dp_size` and
    `distributed.nodes`). 0: none. Of one type: `slurm.extra: {gres: "gpu:a100:8"}` beside it, and that is asked for."""
    mem_mb_per_node: NonNegative = 0
    """0: the partition's default. All memory of the nodes: 0, and `slurm.extra: {mem: 0}`."""
    extra: dict[str, str | int | bool] = {}
    """Further sbatch options by their long names, e.g. {constraint: a100, wckey: my_project}."""
    spare_nodes: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    """Nodes that the job holds beyond those that train; it starts with fewer where Slurm has no more. One takes the
    place of a node that is lost, without a requeue (`--no-kill`). Idle until then, and paid for; not of use for the
    first node, which runs the batch script."""
    successor: bool = True
    """If Slurm may not requeue the job (--no-requeue, or the site's rule): queue another job that follows it."""
    expedite: Literal["auto", "never"] = "auto"
    """auto: `--requeue=expedite` where Slurm offers it. After a lost node the job then starts before all others."""
    modules: tuple[str, ...] = ()
    """What each node loads by `module load` before its ranks start, in this order (Lmod or Environment Modules)."""
    python: str | None = None
    """The ranks' Python: a virtual or conda environment, by its directory or by conda's name for it. It needs this
    version of verl-slurm and what the ranks import. null: the environment that submits."""
    setup: tuple[str, ...] = ()
    """Commands that bash runs on each node before its ranks start, after `modules` and `python`. Each is complete by
    itself; one that fails ends the start. The ranks see what they export; the daemon does not."""
    container: ContainerConfig | None = None
    """null: ranks run in the environment that submits."""


MOST_SERVICES = 16


class ServiceConfig(Section, frozen=True):
    """A process that the ranks need or use, e.g. a judge model or a sandbox (docs/services.md).

    It is started before the ranks, probed, restarted, and ended with the job.
    """

    command: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1)], ...], msgspec.Meta(min_length=1, max_length=1000)
    ]
    """A program, a Python file, or `-m` and a module, and its arguments. `{port}` and `{host}` in a word become where
    it has to listen. A relative Python file is resolved from the directory of the YAML."""
    nodes: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    """Nodes of its own, beyond distributed.nodes, with one such process on each. 0: one process, on the first node of
    the ranks."""
    cpus: NonNegative = 0
    """CPUs that it may use on a node. Beside the ranks they are taken from theirs. 0: all that the node has."""
    gpus: NonNegative = 0
    """GPUs that it sees on a node. Beside the ranks they are the last ones, and the ranks do not see them. 0: none."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """Of its node, for a server that cannot be told one. 0: a free one, another at each start. The ranks' address of
    the service stays the same."""
    probe: str = "tcp"
    """When it counts as ready. `tcp`: its port takes a connection. A path, e.g. `/health`: an HTTP GET there is
    answered with 2xx. The probe carries no token."""
    start_timeout_s: PositiveFloat = 600.0
    """From its start to its first answer, and later without an answer: a service that takes longer is restarted."""
    restarts: NonNegative = 3
    """Restarts in a row. One that was ready for ten minutes has them all again."""
    needed: bool = True
    """true: the ranks wait until it is ready. If it cannot be restarted any more, the run saves and is requeued. false:
    the journal says so, and training goes on."""
    env: dict[str, str | int] = {}
    """Variables of its environment, beside those of the run's `env`."""
    env_from_files: dict[str, str] = {}
    """Secrets of its environment, in the form of the run's `env_from_files`, which it does not get."""
    slurm: dict[str, str | int | bool] = {}
    """Nodes of another kind: sbatch options by their long names, e.g. {partition: cpu, mem: 64G}. The job is then a
    heterogeneous one, and these nodes a component of it, with `cpus` and `gpus` of its own."""

    @property
    def is_apart(self) -> bool:
        """Returns whether its nodes are a component of their own."""
        return bool(self.nodes and self.slurm)


def nodes_of_services(ranks_nodes: int, services: Mapping[str, ServiceConfig]) -> dict[str, range]:
    """Returns the places of each service among all nodes of the job, which Slurm counts over its components."""
    # The ranks have the first nodes, so components of their own come last.
    places, there = {}, ranks_nodes
    for apart in (False, True):
        for name, service in services.items():
            if not service.nodes:
                places[name] = range(1)
            elif service.is_apart == apart:
                places[name] = range(there, there + service.nodes)
                there += service.nodes
    return places


def nodes_of_components(ranks_nodes: int, services: Mapping[str, ServiceConfig]) -> list[int]:
    """Returns the number of nodes of each component of the job; a job that is not heterogeneous has one."""
    first = ranks_nodes + sum(service.nodes for service in services.values() if not service.is_apart)
    return [first, *(service.nodes for service in services.values() if service.is_apart)]


class ObservabilityConfig(Section, frozen=True):
    """Sets what the daemon shows to Prometheus (docs/observability.md). Nothing here changes what is computed."""

    metrics_port: Annotated[int, msgspec.Meta(ge=0, le=65534)] | None = None
    """Port on which the lead answers `GET /metrics` and `/healthz`; each node's agent answers at this port + 1. If a
    port is taken, another one is used. 0: any free ports. `targets_dir` holds the ports in use. null: no port is open.
    """
    metrics_host: Literal["127.0.0.1", "0.0.0.0"] = "127.0.0.1"  # noqa: S104 - with a token
    """`0.0.0.0`: every interface of each node, for a Prometheus on another machine; requires a `token_file`."""
    token_file: str | None = None
    """An absolute path of a 0600 file. A request for /metrics must carry its content (`Authorization: Bearer`). Other
    users of a node can reach 127.0.0.1, too. With it, the newest step's reward, KL, losses and learning rate are
    exported as well."""
    targets_dir: str | None = None
    """An absolute directory, made 0700, in which this run publishes its ports for Prometheus. Several runs may share
    it, because Prometheus takes no pattern for a directory. null: RUN/control/metrics."""


class HealthConfig(Section, frozen=True):
    """Sets how each node is looked at before its ranks start, in a Slurm job (docs/health.md).

    A node that fails is left at once: the job is requeued without it, and no budget is used up. What cannot be looked
    at on a node counts as not checked, never as bad.
    """

    gpu_errors: bool = True
    """Leave a node whose GPUs have uncorrected memory errors, memory that waits for a reset, or an error in the
    kernel's log after which they need a reset; and one on which a GPU of the job is missing or the driver hangs."""
    foreign_processes: bool = True
    """Leave a node on which a process uses a GPU of this job before the ranks start. false: for GPUs that jobs
    share."""
    min_free_mb: NonNegative = 256
    """Leave a node with less room than this, in MiB, in its temporary directory (TMPDIR). 0: not looked at."""
    max_clock_offset_s: NonNegativeFloat = 60.0
    """Leave a node whose clock differs from Slurm's by more than this many seconds. 0: not looked at."""
    known_results: bool = True
    """Before training, each rank of the native trainer multiplies matrices and reduces over all ranks, and compares
    with the known results. A node that multiplies wrongly is left."""
    flight_records: NonNegative = 2000
    """Collectives that torch's Flight Recorder keeps on each rank, to be written to RUN/logs at a hang. 0: as torch
    itself has it."""
    straggler_factor: NonNegativeFloat = 1.5
    """Name a rank in `status` that works this many times as long as the others between two safe points. 0: none."""
    exclude_h: NonNegativeFloat = 12.0
    """Hours for which all runs of the user stay away from a node that was left. 0: only this run does, for
    daemon.avoid_node_s."""


HOOKS = ("on_checkpoint", "on_requeue", "on_end")
"""The hooks that are commands."""


class HooksConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tells others what happens to a run: commands on the lead's node, and a webhook (docs/observability.md).

    Each command gets the event as one line of JSON on standard input. None is waited for while the run trains or saves.
    """

    on_checkpoint: tuple[str, ...] = ()
    """A program and its arguments, run when a checkpoint has been read back and is good."""
    on_requeue: tuple[str, ...] = ()
    """Run when Slurm has accepted the requeue. It has 5 s, or until the job ends."""
    on_end: tuple[str, ...] = ()
    """Run when the run has ended for good. `exit` of the event says how: `OK`, `CANCELLED`, or why it failed."""
    webhook: str | None = None
    """An address (https://...) that gets the same events, and each crash and hang, as a POST of JSON. Its field `text`
    is a sentence, as Slack and Mattermost show it."""
    webhook_token_file: str | None = None
    """A file with mode 0600 whose content is sent as `Authorization: Bearer ...`."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0.0, le=600.0)] = 30.0
    """A command or a POST that takes longer is ended."""


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Declares one more place for verified checkpoints, after the run's own `checkpoints/` (`tiers.run_copies`).

    Credentials never stand here. An S3 tier takes them from where every AWS tool does: the environment, `~/.aws`, or
    the instance's role.
    """

    name: str
    """Names the tier in messages, metrics and `verl-slurm tiers`."""
    kind: str
    """`posix`, `s3`, `archive` (either of the two, by `path` or `bucket`; never pruned) or `plugin:NAME`."""
    path: str | None = None
    """The directory of a directory tier, as the job's first node sees it. It must exist, so that a missing mount is
    noticed; directories below it are made 0700."""
    bucket: str | None = None
    """Of S3."""
    prefix: str = "verl-slurm"
    """Prefix of all of this tier's names, below `path` or in `bucket`."""
    endpoint: str | None = None
    """URL of an S3 server other than Amazon's: https://HOST[:PORT]."""
    region: str | None = None
    """Region of the bucket. null: that of the environment or of `~/.aws/config`."""
    storage_class: str | None = None
    """An S3 storage class, e.g. STANDARD_IA or DEEP_ARCHIVE."""
    keep_days: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Days after which a checkpoint is removed, provided that the next tier has it (`tiers.tier_plan`). null: keep
    permanently."""
    verify: Literal["reread", "checksum"] = "reread"
    """reread: fetch every object again and hash it. checksum: compare the server's own checksum (its ETag, an MD5),
    which needs no second transfer and trusts that the server stored what it hashed."""
    insecure: bool = False
    """Allow an http:// endpoint that is not on this machine. TLS certificates are always checked."""
    options: dict[str, str] = {}
    """Options for a plug-in."""


class DaemonConfig(Section, frozen=True):
    """Sets the daemon's time limits and restart budgets."""

    save_margin_s: PositiveFloat = 3.0
    """An emergency save that is not verified this long before the deadline is given up; the requeue comes first."""
    requeue_delay_s: Annotated[int, msgspec.Meta(ge=1, le=3600)] = 2
    """The requeued job may start after this time (Slurm's own delay is 120 s and more). Where the job takes longer to
    leave its nodes, so that Slurm overruled this, later requeues of the run wait longer by themselves."""
    crash_budget: NonNegative = 8
    """Restarts in place after a rank died, without a verified checkpoint in between, before asking for other nodes."""
    hang_budget: NonNegative = 2
    """Restarts in place after a hang, counted in the same way."""
    node_budget: NonNegative = 2
    """Restarts in place after a node's agent was lost while Slurm still had the node, counted in the same way."""
    avoid_node_s: NonNegative = 3600
    """A requeued job avoids a node that alone caused such failures for this long. 0: it may return at once."""
    spot_notices: Literal["auto", "aws", "gcp", "azure", "none"] = "auto"
    """Ask the cloud's metadata service whether it takes the node back, and save and requeue before. auto: where the
    node's firmware says that it is such a cloud's."""
    hang_floor_s: PositiveFloat = 300.0
    """A rank counts as hung after five times the longest interval that any rank needed between two safe points, and
    never before this time."""
    load_timeout_s: PositiveFloat = 1800.0
    """From a rank's first message to its first safe point: loading models, the first collective, replaying the ledger.
    Also from the start of a save to the next safe point or the end, because training may wait there for storage."""
    backoff_s: NonNegativeFloat = 1.0
    """Wait before a restart in place after one that sampled nothing new. It doubles with each such start in a row."""
    standby_after_s: NonNegativeFloat | None = 60.0
    """After this long in training, agents and ranks for the next restart in place are started ahead: they do their
    imports and sleep (0.3 GB for each rank). null: never."""
    no_progress_limit: Positive = 4
    """Starts without a newer verified checkpoint or rollout before the run stops with a report."""
    start_timeout_s: PositiveFloat = 300.0
    """From the start of the ranks to their first message."""


class RunConfig(Section, frozen=True):
    """Joins all sections."""

    name: str = "run"
    """`{name}` in `run_dir` stands for it."""
    run_dir: str = "runs/{name}"
    """The directory of the run, on a file system that all its nodes see."""
    seed: NonNegative = 0
    """Of all random numbers of the training. The same seed, data and shape give the same run."""
    deterministic: bool = True
    """false: kernels may differ by rounding, and a run is not repeated bit for bit."""
    group: str | None = None
    """A Unix group of yours whose members may read the run's status, numbers and logs (docs/clusters.md); never its
    checkpoints, rollouts or keys. null: nobody but you."""
    env: dict[str, str | int] = {}
    """Variables of the ranks' environment, e.g. {NCCL_DEBUG: WARN}. They win over the node's and slurm.setup's."""
    env_from_files: dict[str, str] = {}
    """Secrets of the ranks' environment: a variable and the file (mode 0600) that holds its value, e.g.
    {WANDB_API_KEY: ~/.wandb_key}. Each node reads it at each start; the value is stored nowhere."""
    trainer: GuestConfig = GuestConfig()
    verl: VerlSection = {}
    """Keys of verl's own, handed on as they are (docs/verl.md)."""
    code: CodeConfig = CodeConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    distributed: DistributedConfig = DistributedConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    slurm: SlurmConfig = SlurmConfig()
    services: Annotated[dict[str, ServiceConfig], msgspec.Meta(max_length=4 * MOST_SERVICES)] = {}
    """Processes beside the ranks, by names of yours: judge models, sandboxes, inference servers."""
    daemon: DaemonConfig = DaemonConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    health: HealthConfig = HealthConfig()
    hooks: HooksConfig = HooksConfig()
    tiers: Annotated[tuple[TierConfig, ...], msgspec.Meta(max_length=8)] = ()
    """Storage tiers that verified checkpoints are copied to, nearest first, e.g. node NVMe, object store, archive: as
    soon as each is verified, and every quarter of an hour."""

    @property
    def all_nodes(self) -> int:
        """Returns the number of nodes of the job: the ranks', spare ones, and those of services."""
        return sum(nodes_of_components(self.held_nodes, self.services))

    @property
    def held_nodes(self) -> int:
        """Returns the number of the ranks' nodes and of the spare ones."""
        return self.distributed.nodes + self.slurm.spare_nodes

    @property
    def least_nodes(self) -> int:
        """Returns the number of the ranks' nodes below which the job does not start."""
        return self.distributed.min_nodes or self.distributed.nodes

    @property
    def may_lose_nodes(self) -> bool:
        """Returns whether the job goes on without a node that is lost."""
        return self.slurm.spare_nodes > 0 or self.distributed.min_nodes is not None

    def cpus_on_nodes_of(self, service: str) -> int:
        """Returns the CPUs that are asked for on each node of a service; empty: of the ranks."""
        apart = service in self.services and self.services[service].is_apart
        return (self.services[service].cpus if apart else 0) or self.slurm.cpus_per_node

    @property
    def speakers(self) -> int:
        """Returns the number of ranks that talk to the daemon."""
        # On Ray the driver alone.
        return 1 if self.trainer.on_ray else self.distributed.world_size

    def speakers_on(self, node_rank: int) -> range:
        """Returns those of one node."""
        # Ray chooses where the driver runs, so each node listens for it.
        return range(1) if self.trainer.on_ray else self.distributed.ranks_on(node_rank)
