"""Specifies the messages of lead, agents and ranks: three parties, two channels, one vocabulary.

* rank ⇄ agent: a Unix SEQPACKET socket in a 0700 directory; the agent checks the peer's uid (SO_PEERCRED).
* agent ⇄ lead: TCP. HMAC-SHA256 challenge in both directions over the token of `RUN/control/lead.json`,
  then every frame carries a sequence number and a MAC (`framing.py`).
* one mapped control page per node (`control_page.py`), so that a rank's poll is one memory read.

A message is a msgpack map with its kind under `"type"`. Unknown kinds, unknown fields and wrong types are
refused, and the channel is closed. None carries a path that a peer acts upon, a pickle, or a command line.

A connection that loses packets, delays them or is cut for less than three minutes changes nothing: TCP recovers. A link
that has ended is not resumed, and its session's key is not used again. The agent ends its ranks and leaves, and the
lead starts the next restart over new links. So no message is received or acted on twice, and none in part.

A restart (one start of all ranks) goes, in the good case:

```
lead  → agent  Baseline(time, places)                    → the agent looks at its node
agent → lead   AgentReady(node, node_id, free_port)
               or, of a node that is not fit: NodeUnfit(evidence)  → the job is requeued without it
lead  → agent  Launch(restart, node_rank, master_addr, master_port, resume, attempt)
rank  → lead   RankStarted (of a program of the user's twice: as its process begins, and as it speaks itself), then
               Progress at once, at most every 0.5 s (rank 0) or 1 s (the others); Notice at times
   a preemption:
lead  → agent  SaveRequest(request_id, stop, seconds_left)   → into the control page
rank  → lead   SaveStarted, PartSaved, Saved or SaveFailed, Stopped (from every rank; Saved from rank 0, after the
               rename; PartSaved, so that the lead can name late ranks)
               before it, where the nodes' disks are done first: SavedOnNodes
   or the end of training:
rank  → lead   Finished (every rank)
               or, where no start could help: Refused(exit_code, reason)
   or, at any time, of a node that its cloud takes back:
agent → lead   SpotNoticeSeen(node, seconds_left)        → as a preemption
   or silence:
lead  → agent  DumpStacks                               → STACKS_SIGNAL to its ranks, who write them into their log
agent → lead   StacksWritten
   and in each case:
agent → lead   NodeExited(exit_code, detail)
lead  → agent  Shutdown
```

An agent that is started ahead of a restart says `StandsBy` first. It hears `Launch` when the restart comes, and
`Shutdown` if it is not wanted any more.

A service (`services` of the configuration) has a host on each of its nodes, which is a peer like an agent: it says
`ServiceSaid`, hears `Shutdown`, and outlives restarts.

Ranks' messages pass through the agent unchanged; it checks that `rank` is one of its own.

The keys under which ranks find each other (torch's `Store`) go the same two ways, over a second Unix socket
(`store_line.py`): rank → agent → lead `StoreCall`, back `StoreAnswer`. The lead holds them for one restart. An agent
replaces `call` by a number of its own and puts the rank's back into the answer.
"""

from typing import Annotated, Literal

import msgspec

MAX_NOTICE = 2000
MAX_REASON = 500
MAX_STORY = 4000
"""Characters of a text for people. A story tells of one error, and may tell of a thousand ranks: a message beyond
`wire.client.MAX_MESSAGE` ends the line."""

Topic = Literal[
    "cadence", "storage", "partial", "frozen", "evaluation", "reward", "device", "ledger", "engine", "rates"
]
"""Topics of a `RankNotice`."""

# \A and \Z, since msgspec searches for the pattern and `$` accepts a newline at the end.
CheckpointName = Annotated[str, msgspec.Meta(pattern=r"\Astep_[0-9]{6,}(?:_sp[0-9]{4,})?\Z", max_length=64)]
"""As `paths.CHECKPOINT_NAME`: a receiver looks for the name below the run's own checkpoints."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of messages: a closed, typed map; the class name is its `type`."""


# ---- lead → agent


class Launch(_Message, frozen=True, kw_only=True):
    """Starts the trainer ranks of this node."""

    restart: int
    attempt: int
    node_rank: int
    nodes: int = 0
    """With ranks; 0: as configured."""
    master_addr: str
    master_port: int
    resume: str
    """Name of the checkpoint directory to resume from; empty: start from nothing."""
    services: Annotated[dict[str, str], msgspec.Meta(max_length=64)] = {}
    """Where the services are that the ranks may use: name -> `host:port`, with commas between several."""
    hosts: tuple[Annotated[str, msgspec.Meta(pattern=r"\A[0-9A-Za-z.:%_-]+\Z", max_length=255)], ...] = ()
    """The addresses of all nodes with ranks."""


# The tag and the field's name are older than the class. If a package is upgraded under a running job, a lead of the old
# release starts agents of the new one.
class SaveRequest(_Message, frozen=True, kw_only=True, tag="StopRequest"):
    """Asks for a save at the next safe point. The policy decides it, the control page relays it, the ranks agree
    on it."""

    request_id: int
    """Grows by one with each request of an attempt, from 1."""
    stop: bool
    """True: leave after the save. False: save and continue (an operator's USR1)."""
    seconds_left: float | None = msgspec.field(default=None, name="deadline_s")
    """Seconds until the ranks must be gone, from the moment at which it is read or received; None: no deadline."""

    @property
    def why(self) -> str:
        """Returns why the save is made, for people (`RankSaved.reason`)."""
        return "the job ends" if self.stop else "asked for"


class Baseline(_Message, frozen=True, kw_only=True):
    """The first message over each link: what the lead sees, for a node to compare itself with. A lead of a release
    before this one sends none."""

    time: float
    """Slurm's clock, in seconds since 1970."""
    places: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=4096)], ...], msgspec.Meta(max_length=1000)
    ] = ()
    """Directories and files that ranks need and the lead sees."""


class DumpStacks(_Message, frozen=True, kw_only=True):
    """Makes every rank of this node write the stacks of its threads."""


class Shutdown(_Message, frozen=True, kw_only=True):
    """Makes the agent kill what still runs on this node and exit."""


# ---- agent → lead


class AgentReady(_Message, frozen=True, kw_only=True):
    """The agent's first message: its identity, and a port that was free a moment ago."""

    node: str
    node_id: int
    """Its index in the allocation, from 0 (SLURM_NODEID)."""
    address: str
    """The address by which other nodes reach it."""
    free_port: int


class StandsBy(_Message, frozen=True, kw_only=True):
    """The first message of an agent that is started ahead of a restart; `AgentReady` follows. Until the restart, what
    becomes of it is nothing to those that train."""

    node: str
    restart: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    """The restart."""


class NodeUnfit(_Message, frozen=True, kw_only=True):
    """Reports, in place of `AgentReady`, that no rank should start on this node."""

    node: str
    evidence: Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
    passing: bool = False
    """It may pass by itself: other runs need not avoid the node."""


class SignalSeen(_Message, frozen=True, kw_only=True):
    """Reports that Slurm signalled this node's step. It is a hint to look, never a cause by itself."""

    node: str
    signal: int


class SpotNoticeSeen(_Message, frozen=True, kw_only=True):
    """Reports that the cloud takes this node back."""

    node: str
    evidence: Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
    seconds_left: Annotated[float, msgspec.Meta(ge=0.0)]


class StacksWritten(_Message, frozen=True, kw_only=True):
    """Reports that the ranks of this node were told to write their stacks, and had some seconds for it."""

    node: str
    # PATH_MAX.
    log: Annotated[str, msgspec.Meta(max_length=4096)]
    """Place of the stacks, for people."""


class NodeExited(_Message, frozen=True, kw_only=True):
    """Reports that the launcher of this node's ranks ended."""

    node: str
    exit_code: int
    detail: str
    """Last lines of the first failed rank's stderr, or the signal that killed it."""


# ---- service host → lead


class ServiceSaid(_Message, frozen=True, kw_only=True):
    """Reports what has become of a service on one of its nodes. The first one is also this peer's first message."""

    service: Annotated[str, msgspec.Meta(pattern=r"\A[a-z][a-z0-9_]{0,31}\Z")]
    index: Annotated[int, msgspec.Meta(ge=0, le=1023)]
    """Which of its nodes, from 0."""
    node: str
    what: Literal["started", "ready", "ended", "failed"]
    """`ended`: it is started again, for the `restarts`-th time in a row. `failed`: it is not."""
    # What each rank finds in its environment: the longest IPv6 address, brackets and a port.
    address: Annotated[str, msgspec.Meta(pattern=r"\A[0-9A-Za-z.:%\[\]_-]+:[0-9]{1,5}\Z", max_length=80)]
    restarts: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    seconds: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """`ready`: since its start."""
    detail: Annotated[str, msgspec.Meta(max_length=MAX_STORY)] = ""


# ---- rank → lead, through its agent


class RankStarted(_Message, frozen=True, kw_only=True):
    """Reports that a rank's process lives: the first message of each connection of a loop."""

    rank: int
    pid: int
    by_program: bool = True
    """False: said for the program, which begins next and has not spoken yet (`rendezvous.rank_start`)."""


class RankUnfit(_Message, frozen=True, kw_only=True):
    """Reports, before training, that this rank's node computes wrongly. The rank ends itself."""

    rank: int
    evidence: Annotated[str, msgspec.Meta(max_length=MAX_REASON)]


class Progress(_Message, frozen=True, kw_only=True):
    """Reports the safe point that a rank has just passed; once more, that it works since then (`Session.alive`)."""

    rank: int
    step: int
    phase: Literal["generate", "score", "advantage", "update", "evaluate", "step_end"]
    index: int
    safe_points: int
    """Safe points passed since the start of this restart."""
    new_rollouts: int
    """Rollouts sampled (not replayed) since the start of this restart."""
    metrics: dict[str, float] = {}
    """At a step's end: reward, kl, loss, tokens per second."""
    gpu_memory_percent: float | None = None
    """Memory in use on this rank's GPU, by all processes; None without a GPU."""
    total: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    """Number of steps, if only the loop knows it; 0: the configuration has it."""
    own_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """Seconds since this rank's first safe point in which it did not wait at one for the others (`stopping.py`)."""


class SaveStarted(_Message, frozen=True, kw_only=True):
    rank: int
    request_id: int
    step: int
    safe_point: int


class PartSaved(_Message, frozen=True, kw_only=True):
    """Reports that this rank's own files of a requested save are durable; it waits for the others'."""

    rank: int
    request_id: int


class RankSaved(_Message, frozen=True, kw_only=True):
    """Rank 0: reports that the checkpoint is renamed into place and durable, on one medium or on all that were asked
    for."""

    rank: int
    request_id: int
    """0: a periodic save."""
    name: CheckpointName
    seconds: float
    num_bytes: int
    on_shared: bool = True
    """False: it is on the nodes' own disks alone (and was read back there); the next start copies it to shared
    storage."""
    problem: str = ""
    """Not empty: degraded. Names the medium that lacks it, and the reason."""
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""
    """Reason of the save, for people (`checkpoint.decide.cadence`)."""


class SavedOnNodes(_Message, frozen=True, kw_only=True):
    """Rank 0, in the save before the end: every node's own disk has its part, read back; shared storage has not, yet.

    `RankSaved` or `RankSaveFailed` follows, unless a failure comes first: then this copy is the newest.
    """

    rank: int
    request_id: int
    name: CheckpointName
    seconds: float
    num_bytes: int


class RankSaveFailed(_Message, frozen=True, kw_only=True):
    rank: int
    request_id: int
    reason: str


class RankNotice(_Message, frozen=True, kw_only=True):
    """Tells people about a save, an evaluation, the reward or a ledger; stops nothing. Rank 0 speaks for all ranks."""

    rank: int
    topic: Topic
    text: Annotated[str, msgspec.Meta(max_length=MAX_NOTICE)]
    loud: bool
    """Something is wrong."""


class RankRefused(_Message, frozen=True, kw_only=True):
    """Reports that this rank ends for a cause that another start would not change (a `VerlSlurmError`), or because the
    user's code raised. In the second case another start may help, once."""

    rank: int
    exit_code: int
    reason: str
    place: str = ""
    """The error of the user's code and its place: `KeyError at /home/a/reward.py:12`. Empty: the user's code did not
    raise."""
    worked: bool = False
    """The user's code has worked before, in this process."""


class Stopped(_Message, frozen=True, kw_only=True):
    """Reports that this rank leaves because it was asked to."""

    rank: int
    request_id: int


class Finished(_Message, frozen=True, kw_only=True):
    """Reports that this rank has done all steps."""

    rank: int
    step: int


# ---- rank → lead and back, through its agent: the ranks' store

MAX_KEY = 8 * 1024
MAX_VALUE = 8 * 1024 * 1024
"""Bytes of one key and one value: the limits of torch's own TCPStore."""

_Key = Annotated[str, msgspec.Meta(max_length=MAX_KEY)]
_Value = Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Call = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class StoreCall(_Message, frozen=True, kw_only=True):
    """Requests one operation of `torch.distributed.Store`. A connection has one call under way at a time."""

    call: _Call
    op: Literal[
        "set",
        "get",
        "add",
        "compare_set",
        "wait",
        "check",
        "delete",
        "count",
        "append",
        "push",
        "pop",
        "length",
    ]
    # As many as the store may hold (`rank_store.MAX_KEYS`).
    keys: Annotated[tuple[_Key, ...], msgspec.Meta(max_length=131_072)] = ()
    """One key; any number for `wait` and `check`; none for `count`."""
    values: Annotated[tuple[_Value, ...], msgspec.Meta(max_length=2)] = ()
    """`set`, `append`, `push`: the value. `compare_set`: expected and desired."""
    number: _Int64 = 0
    """`add`: the summand."""
    timeout_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """`get`, `wait`, `pop`: seconds that the key may take to appear."""


class StoreAnswer(_Message, frozen=True, kw_only=True):
    """Answers a `StoreCall` or a `StrangerMet`."""

    call: _Call
    outcome: Literal["ok", "timeout", "refused"]
    value: bytes = b""
    """`get`, `pop` and `compare_set`."""
    number: _Int64 = 0
    """`add`: the sum. `count`, `length`: how many. `check`, `delete`: 1 for yes."""
    reason: str = ""
    """Reason of a refusal."""


class StrangerMet(_Message, frozen=True, kw_only=True):
    """Reports that a peer of this rank's process group did not prove that it belongs to the run; the rank ends itself
    now."""

    call: _Call
    rank: int
    peers: Annotated[str, msgspec.Meta(max_length=1000)]
    """The ranks whose places were taken, and what is known of the processes that took them, for people."""


ToAgent = Baseline | Launch | SaveRequest | DumpStacks | Shutdown | StoreAnswer
FromStoreClient = StoreCall | StrangerMet
FromRank = (
    RankStarted
    | RankUnfit
    | Progress
    | SaveStarted
    | PartSaved
    | SavedOnNodes
    | RankSaved
    | RankSaveFailed
    | RankNotice
    | RankRefused
    | Stopped
    | Finished
)
FromAgent = (
    AgentReady
    | StandsBy
    | NodeUnfit
    | SignalSeen
    | SpotNoticeSeen
    | StacksWritten
    | NodeExited
    | ServiceSaid
    | FromStoreClient
    | FromRank
)
