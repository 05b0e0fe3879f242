"""The group of commands. Each module offers a `click.Command` of its command's name; it is imported when used."""

from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem

from verl_slurm import __version__
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.shipped import shipped, with_places


class CommandEntry(NamedTuple):
    """The module of a command, below this package, and its line in `--help`."""

    module: str
    help: str


COMMANDS = {
    # Their lines stand here, since `--help` must answer at once.
    "init": CommandEntry("setup.init", "Write a commented configuration for your own model and data."),
    "config": CommandEntry("setup.config", "Every key of a configuration: type, default, meaning."),
    "plan": CommandEntry("run.plan_command", "What to expect of a run, and what a change would buy."),
    "submit": CommandEntry("run.submit", "Check a configuration, and start the run it describes."),
    "status": CommandEntry(
        "run.status_command", "Where a run stands: job, step, last good checkpoint, why it stopped."
    ),
    "list": CommandEntry("run.status_command", "The runs below a directory, or the checkpoints of a run."),
    "samples": CommandEntry("run.logs", "What the policy says: prompts, responses and rewards of a step."),
    "report": CommandEntry(
        "run.report_command", "One page about a run, or several: what happened, what it cost, what it learnt."
    ),
    "serve": CommandEntry("run.report_command", "The runs below a directory in a browser, live."),
    "watch": CommandEntry("run.watch", "Follow a run, or many, over all requeues until they end."),
    "logs": CommandEntry("run.logs", "What the daemon, its agents or the ranks of a run print."),
    "cancel": CommandEntry("run.steering", "End a run's job for good; it will not be requeued."),
    "requeue": CommandEntry("run.steering", "Save, end this job, and have it start again."),
    "update-reward": CommandEntry("run.steering", "Replace the reward while the run goes on."),
    "verify": CommandEntry(
        "checkpoint.verify_command", "Read checkpoints back, every byte; --scrub sets aside what is damaged."
    ),
    "inspect": CommandEntry(
        "checkpoint.verify_command", "What is in a checkpoint, or how two differ, bit for bit."
    ),
    "export": CommandEntry(
        "checkpoint.export_command", "A checkpoint as a Hugging Face model, or as plain .pt files."
    ),
    "reshard": CommandEntry(
        "checkpoint.reshard", "Divide a checkpoint of verl among another number of ranks."
    ),
    "adopt": CommandEntry(
        "checkpoint.adopt_command", "Judge what plain verl has saved, and take it over into a run."
    ),
    "prune": CommandEntry(
        "checkpoint.upkeep", "Remove checkpoints no longer needed, and say why each stays or goes."
    ),
    "tiers": CommandEntry(
        "checkpoint.upkeep", "What lies in which storage tier; copy it on, or bring it back."
    ),
    "fingerprint": CommandEntry(
        "checkpoint.verify_command", "The SHA-256 tree hash of a data set, and its drift."
    ),
    "doctor": CommandEntry(
        "setup.doctor", "Look at a cluster as a run will find it, and say what to change."
    ),
    "demo": CommandEntry(
        "setup.demo_command", "The main job for real on this machine: preempted, resumed, proven."
    ),
    "devcluster": CommandEntry("setup.devcluster", "A real Slurm cluster of several nodes on this machine."),
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        # In the table's order, that of their use; click would sort them by the alphabet.
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        # `list` is a builtin's name.
        name = "list_runs" if cmd_name == "list" else cmd_name.replace("-", "_")
        command: click.Command = getattr(import_module(f"verl_slurm.cli.{entry.module}"), name)
        # Help names docs/ and configs/ as a checkout has them; an installed package has them elsewhere.
        _name_places(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # From the table, too, and for the same reason as in `format_commands`.
        found = [CompletionItem(name, help=entry.help) for name, entry in COMMANDS.items()]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [item for item in found if item.value.startswith(incomplete)] + options

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        root = Path(shipped("configs/quickstart.yaml")).parents[1]
        formatter.write_paragraph()
        formatter.write_text(
            f"Documentation, examples and batch scripts: docs/, configs/ and sbatch/ in {root}"
        )

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            # From the table: click would import each command for its first line.
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])


def _name_places(command: click.Command) -> None:
    command.help = with_places(command.help or "")
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.help:
            parameter.help = with_places(parameter.help)


_EXITS = "\n".join(f"{int(code):>4}  {code.description}" for code in ExitCode)


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=f"\b\nExit codes, the same for every command:\n{_EXITS}",
)
@click.version_option(__version__, prog_name="verl-slurm")
def cli() -> None:
    """Reinforcement-learning post-training that survives what a Slurm cluster does to it.

    \b
    See it work:    verl-slurm demo
    Try it here:    verl-slurm submit quickstart --cluster local --wait
    Your own run:   verl-slurm init my.yaml
    On a cluster:   verl-slurm submit my.yaml slurm.partition=gpu train.steps=500
    Then:           verl-slurm watch runs/NAME
    """
