"""Checks the other values against what PPO and GRPO require. Pure."""

from collections.abc import Iterator

from verl_slurm.config.checks.complaint import Complaint
from verl_slurm.config.schema import RunConfig

__all__ = ["algorithm_complaints"]


def algorithm_complaints(config: RunConfig) -> Iterator[Complaint]:
    """Yields every complaint about the group size, the advantage and the KL penalty."""
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
