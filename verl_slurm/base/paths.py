"""Names the paths of a run, each by a property.

```
RUN/                        0700
  run.yaml                  the resolved config of the first start
  attempt                   fencing token: the attempt that may write
  events.jsonl              what happened, append-only
  steps.jsonl               the numbers of every step, append-only (`journal/steps.py`)
  samples.jsonl             a few responses of each step as text; samples.old.jsonl: older ones
  status.json               snapshot for `verl-slurm status`, replaced atomically
  .dataset_fingerprint      the data set's tree hash and file list at the first start
  .dataset_hashes           hashes of its files, so that a start need not read them all; may be removed
  orchestration.json        orchestration state: written at the first start, read-only after
  rewards.json              the reward in force from each step on, if it was ever replaced
  rewards/<digest>.py       source of each function that was ever the reward
  rewards/switch_0001/      of each replacement: the former reward's head and tokenizer config, and its last scores
  control/                  lead.json (address and token of the live lead), claims of attempts and of successors,
                            resume_once, parts_since, trained_with.yaml (the configuration of the newest ranks),
                            adopted (digests of other runs' checkpoints that this one was told to resume from),
                            tiers.json (what the mover read back in each tier), tiers.lock,
                            reward_request.json (another reward, as an operator asked for it),
                            imports (what the ranks import, for those that stand by),
                            metrics/ (where Prometheus finds the lead and the agents)
  ledger/                   rollout journal: attempt_000003.rank_0000.ledger
  ledger/turns/, tokens/    of verl: single turns and results of tools; tokens of responses that are being sampled
  checkpoints/              step_003000/, latest, quarantine/
  partial/checkpoints/      the same for partial saves, which are never resumed
  resharded/checkpoints/    what a start of verl with another number of ranks reads (`verl/reshard/checkpoint.py`)
  code.json                 what the attempts run of the user's code (`program/code_record.py`)
  code/<digest>/            copies of the user's code, by content; <digest>.json: its files; <sha256>.diff
  frozen/<digest>/          models that do not train, stored once by content; <digest>.json: their expected content
  run_id                    16 hex digits that tell this run from others of its name, in shared tiers
  work/attempt_000003/      where a guest (config/schema.py) of that attempt writes uncommitted files
  logs/                     the output of lead, agents and ranks
  tensorboard/
```
"""

import errno
import os
import re
from pathlib import Path

# step_000012: after 12 whole steps. step_000012_sp0007: 7 safe points into the step after those. A full match excludes
# `step_000012.tmp` and `.step_000012.x.tmp`. At most 18 digits: Python refuses to make a number of 5,000.
CHECKPOINT_NAME = re.compile(r"step_(\d{6,18})(?:_sp(\d{4,18}))?", re.ASCII)


def is_circle(path: "str | os.PathLike[str]") -> bool:
    """Returns whether links on a path lead in a circle: `Path.resolve` of Python 3.11 ends in a RuntimeError there."""
    try:
        os.stat(path)
    except OSError as error:
        return error.errno == errno.ELOOP
    except ValueError:  # a null character: what opens it says so
        return False
    return False


class RunPaths:
    """Names the files of one run; touches no disk. `run`: the run's own directory, if `root` is one level below it."""

    def __init__(self, root: Path | str, run: Path | None = None) -> None:
        self.root = Path(root)
        # Partial saves have a root of their own; checks for links on the way begin at the run's directory.
        self.run = run or self.root

    @property
    def run_yaml(self) -> Path:
        return self.root / "run.yaml"

    @property
    def attempt(self) -> Path:
        return self.root / "attempt"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def steps(self) -> Path:
        return self.root / "steps.jsonl"

    @property
    def samples(self) -> Path:
        return self.root / "samples.jsonl"

    @property
    def old_samples(self) -> Path:
        return self.root / "samples.old.jsonl"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def fingerprint(self) -> Path:
        return self.root / ".dataset_fingerprint"

    @property
    def hash_cache(self) -> Path:
        return self.root / ".dataset_hashes"

    @property
    def orchestration(self) -> Path:
        return self.root / "orchestration.json"

    @property
    def control(self) -> Path:
        return self.root / "control"

    @property
    def lead_address(self) -> Path:
        return self.control / "lead.json"

    @property
    def resume_once(self) -> Path:
        """Marks a submission that names a checkpoint to resume from. The start that resumed removes it."""
        return self.control / "resume_once"

    @property
    def parts_since(self) -> Path:
        """The attempt from which on second copies on nodes' disks count (`lead/nodes_copies.py` of the daemon)."""
        return self.control / "parts_since"

    @property
    def trained_with(self) -> Path:
        """The configuration that the newest ranks were started with."""
        return self.control / "trained_with.yaml"

    @property
    def imports(self) -> Path:
        """What the newest ranks have imported (`wire.standing_by`)."""
        return self.control / "imports"

    @property
    def reward_plan(self) -> Path:
        return self.root / "rewards.json"

    @property
    def reward_request(self) -> Path:
        return self.control / "reward_request.json"

    def reward_source(self, digest: str) -> Path:
        """A copy of the source of a function that was ever a reward."""
        return self.root / "rewards" / f"{digest}.py"

    def reward_snapshot(self, number: int) -> Path:
        """Kept data of the reward that the `number`-th replacement replaced."""
        return self.root / "rewards" / f"switch_{number:04d}"

    @property
    def metrics(self) -> Path:
        """The directory where Prometheus finds its targets (`file_sd_configs`)."""
        return self.control / "metrics"

    @property
    def code_record(self) -> Path:
        return self.root / "code.json"

    @property
    def code(self) -> Path:
        return self.root / "code"

    def code_tree(self, digest: str) -> Path:
        return self.code / digest

    def code_files(self, digest: str) -> Path:
        """The list of a copy's files."""
        return self.code / f"{digest}.json"

    def code_diff(self, digest: str) -> Path:
        """The difference of a tree from its commit; `digest` is the diff's own."""
        return self.code / f"{digest}.diff"

    @property
    def frozen(self) -> Path:
        return self.root / "frozen"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger"

    def ledger_segment(self, attempt: int, rank: int) -> Path:
        # The attempt in the name: where file locks do not work, it keeps two attempts from one file.
        return self.ledger / f"attempt_{attempt:06d}.rank_{rank:04d}.ledger"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int, safe_point: int = 0) -> Path:
        """`step` whole steps done, and `safe_point` safe points of the next one (0: none)."""
        suffix = f"_sp{safe_point:04d}" if safe_point else ""
        return self.checkpoints / f"step_{step:06d}{suffix}"

    def staging(self, final: Path, nonce: str) -> Path:
        """The directory in which `final` is written before the rename publishes it."""
        # In the same directory: the rename stays within one file system.
        return final.parent / f".{final.name}.{nonce}.tmp"

    @property
    def partial(self) -> "RunPaths":
        """The root of partial saves."""
        # Separate, so that no search for a state to resume from finds one.
        return RunPaths(self.root / "partial", self.run)

    @property
    def resharded(self) -> "RunPaths":
        """The root of copies for another number of ranks."""
        return RunPaths(self.root / "resharded", self.run)

    @property
    def latest(self) -> Path:
        return self.checkpoints / "latest"

    @property
    def quarantine(self) -> Path:
        return self.checkpoints / "quarantine"

    def work(self, attempt: int) -> Path:
        """Where a guest's loop of one attempt writes; whole files are moved into a checkpoint from there."""
        # One for each attempt: a fenced one that still writes meets nobody else's files.
        return self.root / "work" / f"attempt_{attempt:06d}"

    @property
    def run_id(self) -> Path:
        # Of the run itself, also for the roots below it.
        return self.run / "run_id"

    @property
    def adopted(self) -> Path:
        """Digests of the manifests that `checkpoint.resume_from` has brought from other runs, one a line."""
        return RunPaths(self.run).control / "adopted"

    @property
    def from_nothing(self) -> Path:
        """Exists from a start with `resume_from: null` to the first checkpoint: no tier is asked for an older one."""
        return self.control / "from_nothing"

    @property
    def tier_records(self) -> Path:
        return self.control / "tiers.json"

    @property
    def tier_lock(self) -> Path:
        return self.control / "tiers.lock"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def rank_log(self, attempt: int, restart: int, node_id: int) -> Path:
        """Output of the ranks of one node, in one restart."""
        return self.logs / f"attempt_{attempt:06d}.restart_{restart:02d}.node_{node_id:04d}.log"

    def flight(self, attempt: int, restart: int) -> Path:
        """The beginning of the names of the Flight Recorder's files, to which the rank is appended."""
        return self.logs / f"attempt_{attempt:06d}.restart_{restart:02d}.flight.rank_"

    def agent_log(self, attempt: int, node_id: int) -> Path:
        """Log of the agents of one node, over all restarts of one attempt."""
        return self.logs / f"attempt_{attempt:06d}.node_{node_id:04d}.agent.log"

    def service_log(self, attempt: int, name: str, index: int) -> Path:
        """Output of a service on the `index`-th of its nodes, over all of its restarts in one attempt."""
        return self.logs / f"attempt_{attempt:06d}.service_{name}.{index:04d}.log"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"
