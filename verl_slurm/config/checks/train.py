"""Checks the sections `data` and `train`: algorithm, batches, learning rates, evaluation, what is kept. Pure."""

import difflib
from collections.abc import Iterator

from verl_slurm.config.checks import Complaint
from verl_slurm.config.roles import eval_metrics, step_metrics
from verl_slurm.config.schema import RunConfig


def data_complaints(config: RunConfig) -> Iterator[Complaint]:
    """Yields every complaint about the data section."""
    data = config.data
    for key, pattern in (("data.files", data.files), ("data.eval_files", data.eval_files)):
        # A pattern that leaves the root would name files outside the fingerprint.
        if pattern is not None and ({"", "..", "."} & set(pattern.split("/")) or not pattern.isprintable()):
            yield Complaint(
                key,
                repr(pattern),
                "a pattern relative to the root, without `..`",
                f"e.g. {key}: data/train-*.parquet",
            )
    # The pattern would be read by nothing: held-out rows of data.root come by eval_fraction.
    if data.eval_files is not None and data.eval_root is None:
        yield Complaint(
            "data.eval_files",
            f"{data.eval_files}, and no data.eval_root",
            "the directory where they are",
            f"set data.eval_root={data.root}",
        )
    if not data.chat_template.strip() or not data.chat_template.isprintable():
        yield Complaint(
            "data.chat_template",
            repr(data.chat_template),
            "auto, none or a path",
            "e.g. data.chat_template: auto",
        )


def batch_complaints(config: RunConfig) -> Iterator[Complaint]:
    """Yields every complaint about sizes that must divide each other, and about the algorithm's own needs."""
    yield from _algorithm(config)
    train, rollout = config.train, config.rollout
    # Each must divide: positions count whole pieces, and the ledger whole generation micro-batches.
    for key, whole, part in (
        (
            "rollout.micro_batch_size_per_device",
            train.batch_size_per_device,
            rollout.micro_batch_size_per_device,
        ),
        ("train.mini_batch_size_per_device", train.batch_size_per_device, train.mini_batch_size_per_device),
        (
            "train.micro_batch_size_per_device",
            train.mini_batch_size_per_device,
            train.micro_batch_size_per_device,
        ),
    ):
        if whole % part:
            yield Complaint(key, str(part), f"a divisor of {whole}", f"e.g. {key}={_divisor(whole, part)}")
    pieces, stages = (
        train.mini_batch_size_per_device // train.micro_batch_size_per_device,
        config.distributed.pp_size,
    )
    if stages > 1 and pieces < stages:
        yield Complaint(
            "distributed.pp_size",
            f"{stages} stages, and mini-batches of {pieces} micro-batches",
            "as many micro-batches as stages, or more: 1F1B keeps them all at work",
            f"e.g. train.micro_batch_size_per_device={max(train.mini_batch_size_per_device // stages, 1)}",
        )
    if train.warmup_steps > train.steps:
        yield Complaint(
            "train.warmup_steps", str(train.warmup_steps), f"at most train.steps={train.steps}", "lower it"
        )


def _divisor(whole: int, near: int) -> int:
    """Returns a divisor of `whole`, at most `near` and not far below it. For a mistyped number of 16 digits it is a
    small one."""
    # Bounded by 1 << 16: a mistyped size of 16 digits would be counted down from, and the check would hang.
    return next(size for size in range(max(min(near, whole, 1 << 16), 1), 0, -1) if whole % size == 0)


def _algorithm(config: RunConfig) -> Iterator[Complaint]:
    """Checks the group size, the advantage and the KL penalty."""
    train, group = config.train, config.rollout.samples_per_prompt
    if train.algorithm == "grpo" and group < 2:
        yield Complaint(
            "rollout.samples_per_prompt",
            str(group),
            "2 or more with train.algorithm=grpo: a response is judged by the others to its prompt",
            "e.g. rollout.samples_per_prompt=8",
        )
    if train.algorithm != "grpo" and train.advantage_scale != "std":
        yield Complaint(
            "train.advantage_scale",
            f"{train.advantage_scale}, with train.algorithm={train.algorithm}",
            "std: PPO's advantages are whitened over the batch",
            "remove it, or set train.algorithm=grpo",
        )
    for key, size in (
        ("rollout.micro_batch_size_per_device", config.rollout.micro_batch_size_per_device),
        ("train.batch_size_per_device", train.batch_size_per_device),
    ):
        if size % group:
            yield Complaint(
                key,
                str(size),
                f"a multiple of rollout.samples_per_prompt={group}: a prompt's responses stay together",
                f"e.g. {key}={-(-size // group) * group}",
            )
    if train.kl_in == "loss" and train.kl_estimator == "k1":
        yield Complaint(
            "train.kl_estimator",
            "k1, with train.kl_in=loss",
            "k3: the gradient of k1 is zero on average",
            "set train.kl_estimator=auto",
        )


def train_complaints(config: RunConfig) -> list[Complaint]:
    """Yields every complaint about these values."""
    return [*_schedule(config), *_evaluation(config), *_best(config)]


def _schedule(config: RunConfig) -> Iterator[Complaint]:
    train = config.train
    # A key that the schedule does not read is refused: it would be ignored silently.
    if train.lr_schedule == "wsd":
        most = max(train.steps - train.warmup_steps, 1)
        if not 1 <= train.lr_decay_steps <= most:
            yield Complaint(
                "train.lr_decay_steps",
                str(train.lr_decay_steps),
                f"1 to {most}, the steps behind the warm-up",
                f"e.g. train.lr_decay_steps={max(most // 5, 1)}",
            )
    elif train.lr_decay_steps:
        yield Complaint(
            "train.lr_decay_steps",
            f"{train.lr_decay_steps}, with lr_schedule {train.lr_schedule}",
            "0: only wsd has it",
            "remove it, or set train.lr_schedule=wsd",
        )
    if train.lr_min_ratio and train.lr_schedule == "constant":
        yield Complaint(
            "train.lr_min_ratio",
            f"{train.lr_min_ratio}, with a rate that never falls",
            "0 with lr_schedule constant",
            "remove it, or set train.lr_schedule",
        )


def _evaluation(config: RunConfig) -> Iterator[Complaint]:
    data, train = config.data, config.train
    root = data.eval_root
    if root is not None and (not root.strip() or not root.isprintable()):
        yield Complaint("data.eval_root", repr(root), "a path or builtin:NAME", "give a path, or null")
    # Each of the two says what is held out.
    if root is not None and data.eval_fraction:
        yield Complaint(
            "data.eval_fraction",
            f"{data.eval_fraction}, with data.eval_root",
            "one of the two",
            "remove one",
        )
    if train.eval_every_steps and root is None and not data.eval_fraction:
        yield Complaint(
            "train.eval_every_steps",
            f"{train.eval_every_steps}, with nothing held out",
            "data.eval_root or data.eval_fraction",
            "e.g. data.eval_fraction=0.05",
        )


def _best(config: RunConfig) -> Iterator[Complaint]:
    checkpoint = config.checkpoint
    if not checkpoint.keep_best:
        return
    metric, of_steps, of_evaluations = checkpoint.best_metric, step_metrics(config), eval_metrics()
    # Accepted, such a name would keep no checkpoint ever, without a word.
    if metric in of_evaluations and not config.train.eval_every_steps:
        yield Complaint(
            "checkpoint.best_metric",
            f"{metric}, of evaluations that are never made",
            "train.eval_every_steps above 0",
            "set it, or another checkpoint.best_metric",
        )
    elif metric not in (*of_steps, *of_evaluations):
        known = (*of_evaluations, *of_steps) if config.train.eval_every_steps else of_steps
        near = difflib.get_close_matches(metric, known, n=1) or ["reward"]
        yield Complaint(
            "checkpoint.best_metric",
            f"{metric!r}, which no step of this run has",
            f"one of {', '.join(known)}",
            f"e.g. checkpoint.best_metric={near[0]}",
        )
