"""Checks learning rates, evaluation and retention by results, beyond their types. Pure."""

import difflib
from collections.abc import Iterator

from verl_slurm.config.checks.complaint import Complaint
from verl_slurm.config.metric_names import eval_metrics, step_metrics
from verl_slurm.config.schema import RunConfig

__all__ = ["train_complaints"]


def train_complaints(config: RunConfig) -> list[Complaint]:
    """Yields every complaint about these values."""
    return [*_schedule(config), *_evaluation(config), *_best(config)]


def _schedule(config: RunConfig) -> Iterator[Complaint]:
    train = config.train
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
