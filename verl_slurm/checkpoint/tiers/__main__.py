"""`python -m verl_slurm.checkpoint.tiers sync|restore --run RUN`, a child of the daemon. Its last line of stdout: JSON.

It is a process of its own, so that boto3 stays out of the daemon's memory and the process can be killed at any moment:
an emergency save does not wait for an upload.
"""

import argparse
import math
import signal
import sys
from pathlib import Path

import msgspec

from verl_slurm.base.errors import TierAway, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.one_line import printable
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.tiers.fetch import fetch_newest
from verl_slurm.checkpoint.tiers.mover import lower_priority, sync
from verl_slurm.config.load import load_resolved

# Seconds until the content of the tiers must be known. Backends limit themselves; a mount or a plug-in may not.
_SURVEY_S = 1800
# The same where the run has a checkpoint, and a tier may have a newer one: no start waits longer for that.
_ASK_S = 60


def main(args: list[str] | None = None) -> int:
    """Returns the exit code; our own errors are one line on standard error."""
    parser = argparse.ArgumentParser(prog="python -m verl_slurm.checkpoint.tiers", description=__doc__)
    parser.add_argument("what", choices=("sync", "restore"), help="one pass; or the newest checkpoint back")
    parser.add_argument("--run", required=True, type=Path, help="the run's directory")
    parser.add_argument("--name", default="", help="of the checkpoint to restore")
    parser.add_argument(
        "--above", default="", help="the run's own newest: what is newer, and it does not know"
    )
    chosen = parser.parse_args(args)
    paths = RunPaths(chosen.run.resolve())
    try:
        config = load_resolved(paths.run_yaml)
        if chosen.what == "restore":  # somebody waits for it: no low priority
            # Default action: the kernel ends this process, even inside a read that does not return.
            signal.alarm(_SURVEY_S if chosen.name or not chosen.above else _ASK_S)
            fetched = fetch_newest(
                paths,
                config,
                only=chosen.name,
                above=chosen.above,
                on_limit=lambda seconds: _extend(seconds * len(config.tiers), chosen.above),
            )
            _say({"name": fetched.name, "reasons": fetched.reasons})
            return ExitCode.OK
        # A pass runs beside the training.
        lower_priority()
        done = sync(paths, config)
    except VerlSlurmError as error:
        sys.stderr.write(error.one_line() + "\n")
        return error.child_code if isinstance(error, TierAway) else int(error.exit_code)
    except OSError as error:  # of RUN's own storage: it passes, as a tier's does
        sys.stderr.write(f"{printable(str(error))}\n")
        return TierAway.child_code
    copied = sum(1 for item in done.done if item.action.kind == "copy" and not item.problem)
    removed = sum(1 for item in done.done if item.action.kind == "drop" and not item.problem)
    _say({"ok": done.ok, "copied": copied, "removed": removed})
    return ExitCode.OK if done.ok else ExitCode.TIER


def _extend(seconds: float, above: str) -> None:
    if above:  # by this line its reader knows that there is one
        _say({"name": None})
    signal.alarm(math.ceil(seconds))


def _say(value: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
