"""`verl-slurm report` and `serve`: pages about runs."""

import asyncio
import contextlib
import errno
import signal
from pathlib import Path

import click

from verl_slurm.base.bounded import TooMuch, open_regular
from verl_slurm.base.errors import NotFound, PermissionRefused, WireError
from verl_slurm.base.files import write_file
from verl_slurm.base.one_line import counted
from verl_slurm.base.paths import RunPaths
from verl_slurm.cli.command_options import DAMAGED_RUN, PLACE, Whole, command, option
from verl_slurm.cli.show import render, story
from verl_slurm.report.gather import gather
from verl_slurm.report.page import render_page
from verl_slurm.report.report_facts import Report
from verl_slurm.report.serve import HOST, Server
from verl_slurm.wire.tcp_table import listener_of

_BEGINNING = b"<!doctype html>"


@command("NOT_FOUND")
@click.argument("runs", type=DAMAGED_RUN, metavar="RUN...", nargs=-1, required=True)
@option("--out", PLACE, "Where the page goes; default: report.html here.", metavar="FILE.html")
@option(
    "--samples",
    Whole(min=0, max=100),
    "How many of the best and of the worst responses of the newest step are shown; 0: none.",
    default=3,
)
def report(runs: tuple[RunPaths, ...], out: Path | None, samples: int, as_json: bool) -> None:
    """Write one page about RUN: its timeline, each interruption with cause and cost, goodput and where the rest of the
    time went, hours, curves, responses, checkpoints, nodes.

    The page is one file that needs no network, for a browser, a printer or a colleague. Of several runs, the curves
    are drawn over each other, and the differences of their configurations are listed. A run may be running: its
    numbers are provisional then. Of a damaged run, the page says what is missing.

    The file is readable by you alone (0600): it holds what the run's prompts and responses hold; --samples 0 leaves
    those out. --json prints the same facts and writes no page, unless --out is given, too. docs/report.md explains the
    numbers.

    \b
    verl-slurm report runs/my
    verl-slurm report runs/a runs/b --out ab.html
    verl-slurm report runs/my --json | jq '.runs[0].time_use'
    """
    # One that is named twice would be compared with itself.
    facts = gather(list({run.root: run for run in runs}.values()), num_samples=samples)
    if out is not None or not as_json:
        written = _write(out or Path("report.html"), facts)
        if not as_json:
            render.fields(written)
    if as_json:
        import msgspec

        render.json_value(msgspec.to_builtins(facts))


def _require_page(out: Path) -> None:
    try:
        with open(open_regular(out), "rb") as there:
            # A device or a file of a run is not replaced.
            is_page = there.read(len(_BEGINNING)).lower() == _BEGINNING
    except FileNotFoundError:
        return
    except (OSError, TooMuch):
        is_page = False
    if not is_page:
        raise PermissionRefused("something else is in the way", where=out, remedy="choose another --out")


def _write(out: Path, facts: Report) -> list[tuple[str, object]]:
    data = render_page(facts).encode()
    # A link is followed: its target is replaced, and not the link.
    out = out.resolve()
    _require_page(out)
    try:
        write_file(out, data, durable=False)
    except OSError as error:
        raise PermissionRefused(
            "the page cannot be written", where=out, found=error.strerror, remedy="choose another --out"
        ) from None
    missing = [("missing", f"{run.name}: {what}") for run in facts.runs for what in run.missing]
    return [("page", out.resolve()), ("size", f"{len(data) / 1000:.0f} KB"), *missing]


@command("NOT_FOUND WIRE")
@click.argument("place", type=PLACE, metavar="[DIR]", default="runs")
@option("--port", Whole(0, 65535), "0: any free one.", default=0)
def serve(place: Path, port: int, as_json: bool) -> None:
    """Show the runs below DIR (default: runs) in a browser, live, until Ctrl-C.

    A table of all runs, and the page of `verl-slurm report` for each. The browser is told of what changes. Nothing is
    polled while no page is open; while one is, Slurm is asked once a minute, one question for all runs.

    It listens on 127.0.0.1 alone, can change nothing, and refuses each request without the token in the printed
    address. To open the page on another machine, forward the port there and open the same address:

    \b
    verl-slurm serve runs --port 8123
    ssh -N -L 8123:127.0.0.1:8123 LOGIN_NODE

    docs/serve.md tells who may read what.
    """
    if not place.is_dir():
        raise NotFound("no such directory", where=place, remedy="give the directory that holds your runs")

    def ready(address: str, runs: int) -> None:
        value = {"listening": address, "runs": runs}
        render.answer(value, f"{counted(runs, 'run')} at {address}", as_json=as_json)

    async def until_ended() -> None:
        # Without the time, which the story has in front: the table has a column of its own.
        server = Server(place, lambda event: story.tell(story.for_people(event)).partition("  ")[2])
        serving = asyncio.create_task(server.run(port, ready))
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await serving

    try:
        asyncio.run(until_ended())
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        where, found = f"{HOST}:{port}", error.strerror
        if error.errno == errno.EADDRINUSE:
            found = f"the port is taken by {listener_of(port).name}"
        raise WireError("cannot listen", where=where, found=found, remedy="choose another --port") from error
