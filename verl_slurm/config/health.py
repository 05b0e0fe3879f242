"""Declares the section `health` of the configuration: which nodes a run trains on."""

from verl_slurm.config.section import NonNegative, NonNegativeFloat, Section


class HealthConfig(Section, frozen=True):
    """Sets how each node is looked at before its ranks start, in a Slurm job (docs/health.md).

    A node that fails is left at once: the job is requeued without it, and no budget is used up. What cannot be looked
    at on a node counts as not checked, never as bad.
    """

    check_nodes: bool = True
    """false: no node is looked at."""
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
