"""Defines the exit codes of every verl-slurm program. Scripts may rely on these numbers; a number is never reused."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Names each kind of end by one number. `--help` prints the text of each."""

    description: str

    def __new__(cls, value: int, description: str = "") -> "ExitCode":
        member = int.__new__(cls, value)
        member._value_ = value
        member.description = description
        return member

    OK = 0, "done"
    INTERNAL = 1, "a bug of ours: please report it with the traceback"
    USAGE = 2, "the command line was not understood"
    CONFIG = 10, "the configuration is no YAML, has an unknown key or a value that does not fit"
    DATA = (
        11,
        "the data set, the model, the reward or the program cannot be used: missing, empty, unreadable or wrong",
    )
    PERMISSION = 12, "a path may not be read or written, or is open to others"
    NO_SLURM = 13, "Slurm is not there or does not answer"
    SLURM_REFUSED = 14, "Slurm refused the job or the request (partition, account, limits)"
    SCHEMA = 15, "the checkpoint was written by a version with another state layout"
    DATASET_DRIFT = 16, "the data set is not the one the run started with"
    CORRUPT = 17, "a checkpoint did not verify, or a run has lost all of its checkpoints"
    NOT_FOUND = 18, "no such run, checkpoint or job"
    DIFFERENT = 19, "the two things compared are not the same"
    FENCED = 20, "another attempt of this run owns it"
    NO_PROGRESS = 21, "several restarts without a newer verified checkpoint: stopped, not requeued"
    CRASHED = 22, "the job ended without the last word of its daemon"
    CANCELLED = 23, "the job was cancelled by its user: not requeued"
    REQUEUE_FAILED = 24, "the job could not be requeued; what is saved stays"
    REQUEUED = 25, "the run goes on by itself: its job was requeued, or another one follows it"
    WIRE = 26, "the control channel was refused or broke"
    NO_ROOM = 27, "the file system has no room for a checkpoint"
    KEY = 28, "an encryption key is missing or another one, or a checkpoint that needs its signature has none"
    TIER = 29, "a storage tier did not answer, refused, or gave back other bytes"
    ROLLOUT = 30, "the rollout engine did not sample with the weights that it was given"
    UNFIT = 31, "doctor found something that would cost a run its work"
    DIVERGED = 32, "the training diverged: a gradient is no number; the newest checkpoint is from before"
    OUTPUT = 33, "standard output cannot be written: its file system is full, say"
    INTERRUPTED = 130, "Ctrl-C; a run that was followed goes on"
    PIPE = 141, "whatever read standard output has left, e.g. head"
