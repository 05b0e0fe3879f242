"""What a run of this benchmark leaves behind: one JSON document, from which the page is made."""

import msgspec

from benchmarks.save.records import Environment


class Where(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The device that the figures are of."""

    device: str
    """`cuda` or `cpu`."""
    name: str
    driver: str
    """Empty: there is none."""
    cuda: str
    """That torch was built with; empty: with none."""
    memory_gib: float
    """Of the GPU; 0: there is none."""


class SaveFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Saves of a state that does nothing else: medians over `reps`."""

    gib: float
    pinned: bool
    reps: int
    warm_s: float
    """To the end of a first save that is asked for at once: it waits until the arena is faulted in and pinned."""
    ready_s: float = 0.0
    """Until the arena is faulted in and pinned, beside whatever else happens at the start."""
    first_fence_ms: float = 0.0
    """`fence_ms` of the first save, once the arena is ready."""
    begin_ms: float
    """That `begin` holds the training up."""
    fence_ms: float
    """Until the tensors may be changed, if they are to be changed at once."""
    durable_s: float
    """Until it is on disk, hashed and fsynced."""


class SamplingFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One batch of responses of full length, sampled by the engine `hf`: medians over a few repetitions."""

    dtype: str
    rows: int
    tokens: int
    """Of each response."""
    weight_gib: float
    """That every token reads."""
    eager_ms: float
    """A token of all rows, launched kernel by kernel."""
    graph_ms: float | None
    """The same as one recorded graph; None: no GPU."""
    first_graph_s: float | None
    """The first batch, while the graph is recorded."""
    same_bits: bool
    """Each way gives the same bits whenever it is asked."""
    same_tokens: float
    """Share of the tokens that both ways have at the same place: they round differently, and one other token makes all
    behind it others."""


class RunFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two whole runs of one precision: one in one go, one stopped among the updates of a step and resumed."""

    precision: str
    state_gib: float
    """Of one checkpoint."""
    step_s: float
    """Median over the steps of the undisturbed run but the first."""
    generate_s: float
    score_s: float
    update_s: float
    emergency_s: float
    """From the request to a durable, committed checkpoint."""
    resume_s: float
    """From the start of building the rank to its first piece of work; the process and CUDA are up."""
    same_bits: bool
    """Both ends alike: weights, optimizer, generators, history."""


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of it."""

    label: str
    """`no GPU here`, or the GPU's name."""
    command: str
    where: Where
    environment: Environment
    parameters: int
    runs: tuple[RunFigures, ...]
    saves: tuple[SaveFigures, ...]
    sampling: tuple[SamplingFigures, ...] = ()
    left_out: tuple[str, ...]
    """What was not measured, and why."""
