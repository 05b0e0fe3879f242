"""`verl-slurm serve`: the runs below a directory, live in a browser."""

import asyncio
import contextlib
import errno
import signal
from pathlib import Path

import click

from verl_slurm.base.errors import NotFound, WireError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.one_line import counted
from verl_slurm.cli.options import PLACE, Whole, exits, json_option
from verl_slurm.cli.show import render, story
from verl_slurm.report.serve import HOST, Server
from verl_slurm.wire.http import listener_of


@click.command(epilog=exits(ExitCode.NOT_FOUND, ExitCode.WIRE))
@click.argument("place", type=PLACE, metavar="[DIR]", default="runs")
@click.option("--port", type=Whole(0, 65535), default=0, show_default=True, help="0: any free one.")
@json_option
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
