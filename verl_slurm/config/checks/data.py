"""Checks of the data section beyond its types. Pure."""

from collections.abc import Iterator

from verl_slurm.config.checks.complaint import Complaint
from verl_slurm.config.schema import RunConfig

__all__ = ["data_complaints"]


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
