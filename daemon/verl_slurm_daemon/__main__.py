"""`verl-slurmd`: the daemon's entry. argv in, exit code out."""

# ruff: noqa: E402 - nothing is imported before the search path is known to be safe
from verl_slurm.base.search_path import leave_working_directory

leave_working_directory("verl-slurmd", __name__)

import argparse
import os
import signal
import socket
import sys
from pathlib import Path

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.processes import forbid_core_dumps
from verl_slurm.wire.environment import UMASK_VARIABLE
from verl_slurm_daemon.agent.agent_log import quiet_streams
from verl_slurm_daemon.descendants import WARNINGS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="verl-slurmd", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    lead = commands.add_parser(
        "lead", help="be the batch process of a job: the last line of an sbatch script"
    )
    lead.add_argument(
        "--run", type=Path, required=True, help="the run directory, made by `verl-slurm submit`"
    )
    lead.add_argument(
        "--hostfile", type=Path, help="without Slurm: the hosts, this one first (`NAME slots=N` lines)"
    )
    join = commands.add_parser(
        "join", help="take part from another host of a hostfile; start it on each of them"
    )
    join.add_argument("--run", type=Path, required=True)
    join.add_argument("--hostfile", type=Path, required=True)
    join.add_argument(
        "--host", default=socket.gethostname(), help="which line this host is [default: its name]"
    )
    agent = commands.add_parser("agent", help="be one node's agent; the lead starts these")
    agent.add_argument("--run", type=Path, required=True)
    agent.add_argument("--attempt", type=int, required=True)
    agent.add_argument("--stand-by", type=int, default=0, metavar="N", help="wait for the N-th restart")
    service = commands.add_parser("service", help="be the host of a service; the lead starts these")
    service.add_argument("--run", type=Path, required=True)
    service.add_argument("--attempt", type=int, required=True)
    service.add_argument("--name", required=True)
    home = commands.add_parser(
        "bring-home", help="send this node's second copies to shared storage; the lead starts these"
    )
    home.add_argument("--run", type=Path, required=True)
    home.add_argument("--attempt", type=int, required=True)
    home.add_argument("--after", default="", help="only what is newer than this checkpoint")
    return parser


def main() -> int:
    """Runs the subcommand in argv. Prints a `VerlSlurmError` as one line on stderr and returns its exit code."""
    # Handed on, for the user's programs; an agent has the lead's word for it.
    os.environ.setdefault(UMASK_VARIABLE, f"{os.umask(0o077):03o}")
    forbid_core_dumps(for_good=True)  # the channel's token is in memory
    args = _parser().parse_args()
    try:
        # Each subcommand imports its own half: an agent does not need checkpoints, which cost 14 MB.
        if args.command == "lead":
            from verl_slurm_daemon.lead.lead_loop import run_lead

            quiet_streams()  # a reader of the lead's log may stop reading; a save must not wait for it
            run_lead(args.run, args.hostfile)
        if args.command == "join":
            from verl_slurm_daemon.agent.join import run_join

            return int(run_join(args.run.resolve(), args.hostfile, args.host))
        if args.command == "bring-home":
            from verl_slurm_daemon.lead.nodes_copies import run_bring_home

            return int(run_bring_home(args.run.resolve(), args.attempt, args.after))
        # Signals from Slurm stay pending until the agent listens: their default action would end it.
        signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)
        quiet_streams()
        if args.command == "service":
            from verl_slurm_daemon.agent.service import run_service

            return int(run_service(args.run.resolve(), args.attempt, args.name))
        from verl_slurm_daemon.agent.node import run_agent

        return int(run_agent(args.run.resolve(), args.attempt, args.stand_by))
    except VerlSlurmError as error:
        print(f"verl-slurmd: {error.one_line()}", file=sys.stderr)
        return int(error.exit_code)
    except OSError as error:  # before the journal was open, or when nothing can be written any more
        print(
            f"verl-slurmd: {error}: storage or network failed; verl-slurm doctor says which", file=sys.stderr
        )
        return int(ExitCode.CRASHED)
    except KeyboardInterrupt:
        return int(ExitCode.CANCELLED)


if __name__ == "__main__":
    sys.exit(main())
