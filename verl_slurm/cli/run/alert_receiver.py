"""`verl-slurm alert-receiver`: from a firing alert of Alertmanager to an emergency checkpoint.

Of everything in an alert, three things are read: that it fires, that its rule says `action: emergency_checkpoint`,
and the run it is about (`run_id`). No text in it is taken as a command, a path or a job.
"""

import asyncio
import errno
import secrets
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import click
import msgspec

from verl_slurm.base.errors import UNREADABLE, VerlSlurmError, WireError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import write_file
from verl_slurm.base.one_line import counted
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import RUN_ID, run_id
from verl_slurm.cli.options import RUN, Number, Whole, exits, json_option
from verl_slurm.cli.show import render
from verl_slurm.journal.events import AlertSaveAsked
from verl_slurm.journal.files import append_event
from verl_slurm.runs.requests import ask_for_save
from verl_slurm.wire.http import (
    Caps,
    HttpReply,
    HttpRequest,
    listener_of,
    read_token,
    replace_token,
    serve_http,
)

_HOST = "127.0.0.1"
_BODY_BYTES = 256 * 1024
"""An alert is about 1 KB; Alertmanager groups them, and `max_alerts` bounds a group."""


@click.command("alert-receiver", epilog=exits(ExitCode.KEY, ExitCode.WIRE, ExitCode.NOT_FOUND))
@click.argument("runs", metavar="RUN...", type=RUN, nargs=-1, required=True)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    required=True,
    help="A 0600 file with the token that Alertmanager brings (umask 077; openssl rand -hex 32 > FILE).",
)
@click.option("--port", type=Whole(0, 65535), default=9470, show_default=True, help="0: any free one.")
@click.option(
    "--pause",
    "pause_s",
    type=Number(min=1.0),
    metavar="S",
    default=600.0,
    show_default=True,
    help="Ask no run again sooner: an alert is sent again and again while it fires.",
)
@json_option
def alert_receiver(
    runs: tuple[RunPaths, ...], token_file: Path, port: int, pause_s: float, as_json: bool
) -> None:
    """Have each RUN save when Alertmanager says so; until Ctrl-C or TERM.

    Listens on 127.0.0.1 for Alertmanager's webhook (POST /alert), where Slurm can be asked. A firing alert of a rule
    with the label `action: emergency_checkpoint` asks the run with its `run_id` to save and to go on training: the
    signal of an operator, `scancel --batch --signal=USR1 JOB`. It can do nothing else: without the token nothing is
    read, a run that is not named here is refused, and no alert names a command, a job or a path.

    Where another user holds the port, Alertmanager shows him the token. The receiver says so, and replaces the token
    in its file as soon as the port is its own.

    The rules, Alertmanager's configuration and all of the way: docs/observability.md.

    \b
    verl-slurm alert-receiver runs/big runs/small --token-file ~/.config/verl-slurm/alerts.token
    """
    # Refused here, before a loop runs: a token that others can read is no token.
    read_token(token_file)
    receiver = _Receiver({run_id(run): run for run in runs}, token_file, pause_s, as_json)
    asyncio.run(receiver.serve(port))


class _Receiver:
    def __init__(self, runs: dict[str, RunPaths], token_file: Path, pause_s: float, as_json: bool) -> None:
        self._runs, self._token_file, self._pause_s, self._as_json = runs, token_file, pause_s, as_json
        self._asked_at: dict[str, float] = {}

    async def serve(self, port: int) -> None:
        caps = Caps(method="POST", body_bytes=_BODY_BYTES, bearers=8)
        # A file and not a variable: the receiver that finds the port taken ends, and a later one has to know.
        leaked = self._token_file.with_name(self._token_file.name + ".leaked")
        token = secrets.token_hex(32) if leaked.exists() else read_token(self._token_file)
        try:
            server, port = await serve_http(_HOST, port, self._answer, caps, token)
        except OSError as error:
            raise self._taken(port, error, leaked) from error
        if leaked.exists():  # not before we listen: Alertmanager sends the file's content with each alert
            replace_token(self._token_file, token)
            leaked.unlink(missing_ok=True)
            text = f"{self._token_file}: replaced, another user may have seen the old one"
            render.answer({"token": text}, text, as_json=self._as_json)
        enough = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, enough.set)
        address = f"http://{_HOST}:{port}/alert"
        text = f"listening at {address} for {counted(len(self._runs), 'run')}"
        value = {"listening": address, "runs": sorted(self._runs)}
        render.answer(value, text, as_json=self._as_json)
        async with server:
            await enough.wait()

    def _taken(self, port: int, error: OSError, leaked: Path) -> WireError:
        where, remedy = f"{_HOST}:{port}", "choose another one with --port"
        if error.errno != errno.EADDRINUSE:
            return WireError("cannot listen", where=where, found=error.strerror, remedy=remedy)
        listener = listener_of(port)
        found = f"the port is taken by {listener.name}"
        if listener.stranger:
            write_file(leaked, b"")
            found += ", to whom Alertmanager shows the token"
            remedy += " and in alertmanager.yml; the next receiver that can listen replaces the token"
            if port >= 1024:
                remedy += "; a port below 1024 cannot be taken by users"
        return WireError("cannot listen", where=where, found=found, remedy=remedy)

    async def _answer(self, request: HttpRequest) -> HttpReply:
        # Before path and body: without the token no answer tells what is served here.
        if not request.bearer:
            return HttpReply(401)
        if request.path != "/alert":
            return HttpReply(404)
        try:
            asked = runs_to_save(request.body)
        except WireError:
            return HttpReply(400)
        # Monotonic: a clock that is set back would keep a run from being asked for longer than the pause.
        now = time.monotonic()
        verdicts = decide_saves(asked, frozenset(self._runs), self._asked_at, now, self._pause_s)
        told: dict[str, str] = dict(verdicts)
        failed = False
        for run, verdict in verdicts.items():
            if verdict == "save":
                self._asked_at[run] = now  # before the wait: a second alert must not ask at the same time
                told[run] = await self._save(run)
                failed |= told[run].startswith("failed")
                # What was not asked for is not held against the next alert.
                if not told[run].startswith("asked"):
                    del self._asked_at[run]
        self._say(told)
        # Alertmanager repeats what was answered by 503.
        return HttpReply(503 if failed else 200, msgspec.json.encode(told) + b"\n", "application/json")

    async def _save(self, number: str) -> str:
        run = self._runs[number]
        try:
            # In a thread: Slurm may take seconds to answer, in which other alerts are to be heard.
            job_id = await asyncio.to_thread(ask_for_save, run)
            if not job_id:
                return "no job of it is running"
            append_event(run, AlertSaveAsked(job_id=job_id))
        except VerlSlurmError as error:  # Alertmanager repeats the alert
            return f"failed: {error.one_line()}"
        # The job has its signal by then: a failure would have the alert repeated, and the run saved twice.
        except OSError as error:
            return f"asked, and not journaled: {error}"
        return f"asked job {job_id}"

    def _say(self, told: dict[str, str]) -> None:
        if self._as_json:
            render.json_value({"alert": told})
            return
        for run, text in told.items():
            root = self._runs[run].root if run in self._runs else run
            render.line(f"alert for {root}: {text}")


ACTION = "emergency_checkpoint"
"""The value of the label `action` with which a rule asks for a save."""

Verdict = Literal["save", "unknown run", "asked already"]


class _Alert(msgspec.Struct):
    status: Annotated[str, msgspec.Meta(max_length=64)]
    labels: Annotated[dict[str, str], msgspec.Meta(max_length=128)]


class _Webhook(msgspec.Struct):
    """The fields that are read of https://prometheus.io/docs/alerting/latest/configuration/#webhook_config."""

    alerts: Annotated[list[_Alert], msgspec.Meta(max_length=1024)]


_DECODER = msgspec.json.Decoder(_Webhook)


def runs_to_save(body: bytes) -> list[str]:
    """Returns the ids of the runs that firing alerts ask a save for, each once, in their order.

    Raises:
        WireError: not what Alertmanager sends.
    """
    try:
        hook = _DECODER.decode(body)
    except UNREADABLE as error:
        raise WireError("not an alert", found=error) from error
    firing = [a.labels for a in hook.alerts if a.status == "firing" and a.labels.get("action") == ACTION]
    found = [labels.get("run_id", "") for labels in firing]
    # A group of alerts names the same run several times. What is no run id is dropped here, so that it is in no answer.
    return list(dict.fromkeys(run for run in found if RUN_ID.fullmatch(run)))


def decide_saves(
    asked: list[str], known: frozenset[str], last: Mapping[str, float], now: float, pause_s: float
) -> dict[str, Verdict]:
    """Decides what to do for each run.

    Args:
        asked: from `runs_to_save`.
        known: the runs that this receiver serves.
        last: when each was last asked for a save, by the clock of `now`.
        pause_s: no run is asked again sooner: an alert is repeated as long as it fires.
    """
    verdicts: dict[str, Verdict] = {}
    for run in asked:
        if run not in known:
            verdicts[run] = "unknown run"
        elif run in last and now - last[run] < pause_s:
            verdicts[run] = "asked already"
        else:
            verdicts[run] = "save"
    return verdicts
