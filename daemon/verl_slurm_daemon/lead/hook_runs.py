"""Tells others what happens to the run: the user's commands and webhook (`hooks` in the configuration).

Each call is a process of its own with the lowest priority. Those of one hook come one at a time, in the order of the
events; a slow hook holds up no other. The lead waits for none of them while the run trains, saves or is taken down; at
its own end it waits a little for those that are left. A hook that fails, hangs or is missing changes nothing of the
run: the journal says so, once in an attempt.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.one_line import json_line
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal import events as ev
from verl_slurm.journal.files import to_json
from verl_slurm.wire.environment import HOOK_RUN_VARIABLE, HOOK_VARIABLE, users_umask
from verl_slurm_daemon.descendants import child_setup
from verl_slurm_daemon.lead.attempt_start import answered
from verl_slurm_daemon.lead.webhook import Post

_MOST_WAITING = 64
"""Calls of one hook that wait. Where a run saves faster than the hook answers, the newest are dropped."""
_REQUEUE_S = 5.0
_SAID_BYTES = 300


class _Call(NamedTuple):
    hook: str
    argv: tuple[str, ...]
    stdin: bytes


def hooks_of(event: ev.Event) -> tuple[str, ...]:
    """Returns the keys of `hooks` that want this event. Pure."""
    match event:
        case ev.Verified():
            return ("on_checkpoint", "webhook")
        case ev.Requeue(accepted=True):
            return ("on_requeue", "webhook")
        case ev.Crash() | ev.Hang():
            return ("webhook",)
        # Not the end of an attempt that another one follows.
        case ev.Ended(exit_code=ExitCode.REQUEUED):
            return ()
        case ev.Ended():
            return ("on_end", "webhook")
    return ()


def sentence(name: str, event: ev.Event) -> str:
    """Returns what happened, for people."""
    match event:
        case ev.Verified():
            return f"{name}: checkpoint {event.name} was read back and is good"
        case ev.Requeue():
            return f"{name}: {event.detail}"
        case ev.Crash():
            return f"{name}: crashed ({event.crashes} of {event.budget} in a row): {event.detail}"
        case ev.Hang():
            return f"{name}: hangs: {event.detail}"
        case ev.Ended():
            return f"{name}: ended with {event.exit}: {event.reason}"
    return name


class Hooks:
    """The hooks of one attempt. `warn` takes what is wrong with a hook, once for each."""

    def __init__(self, paths: RunPaths, config: RunConfig, warn: Callable[[str], None]) -> None:
        self._paths, self._name, self._hooks, self._warn = paths, config.name, config.hooks, warn
        self._waiting: dict[str, list[_Call]] = defaultdict(list)
        self._workers: dict[str, asyncio.Task[None]] = {}
        self._warned = set[str]()

    def hear(self, event: ev.Event) -> None:
        """Has the hooks of this event called, when those before it are done."""
        payload = to_json(event) | {"run": self._name, "run_dir": str(self._paths.root)}
        body = json_line(payload | {"text": sentence(self._name, event)})
        for hook in hooks_of(event):
            call, waiting = self._call(hook, body.rstrip(b"\n")), self._waiting[hook]
            if call is None:
                continue
            if len(waiting) >= _MOST_WAITING:
                self._complain(hook, f"{_MOST_WAITING} calls wait, further ones are dropped")
                continue
            waiting.append(call)
            worker = self._workers.get(hook)
            if worker is None or worker.done():
                self._workers[hook] = asyncio.get_running_loop().create_task(self._work(waiting))

    async def drain(self, *, requeued: bool = False) -> None:
        """Waits for the calls that are left, then ends them; if `requeued`, a few seconds have to do."""
        if not self._workers:
            return
        # After a requeue others want the nodes, and the run starts again.
        workers = self._workers.values()
        _, late = await asyncio.wait(workers, timeout=_REQUEUE_S if requeued else self._hooks.timeout_s + 1.0)
        for worker in late:
            worker.cancel()
        # Until their processes are gone, too.
        await asyncio.gather(*workers, return_exceptions=True)

    def _call(self, hook: str, body: bytes) -> _Call | None:
        if hook != "webhook":
            argv: tuple[str, ...] = getattr(self._hooks, hook)
            return _Call(hook, argv, body + b"\n") if argv else None
        if self._hooks.webhook is None:
            return None
        # By standard input: the address and the token's file are nobody's who lists processes.
        post = Post(self._hooks.webhook, self._hooks.webhook_token_file, self._hooks.timeout_s, body.decode())
        return _Call(hook, (sys.executable, "-P", "-m", "verl_slurm_daemon.lead.webhook"), json_line(post))

    async def _work(self, waiting: list[_Call]) -> None:
        while waiting:
            call = waiting.pop(0)
            try:
                await self._run(call)
            except OSError as error:  # no such program, no process left
                self._complain(call.hook, error.strerror or str(error))

    async def _run(self, call: _Call) -> None:
        await answered(self._paths.root.stat)  # else the start of a process there would stop the lead's loop
        process = await asyncio.create_subprocess_exec(
            *call.argv,
            env=os.environ | {HOOK_VARIABLE: call.hook, HOOK_RUN_VARIABLE: str(self._paths.root)},
            cwd=self._paths.root,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_setup,
            umask=users_umask(),
        )
        try:
            async with asyncio.timeout(self._hooks.timeout_s):
                _, said = await process.communicate(call.stdin)
        except TimeoutError:
            self._complain(call.hook, f"no end after {self._hooks.timeout_s:g} s")
            return
        finally:
            # With what it has started: its session is its own.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            lines = said[-_SAID_BYTES:].decode("utf-8", "replace").strip().splitlines()
            self._complain(call.hook, f"exit code {process.returncode}" + (f": {lines[-1]}" if lines else ""))

    def _complain(self, hook: str, problem: str) -> None:
        if hook not in self._warned:
            self._warned.add(hook)
            self._warn(f"hooks.{hook}: {problem}")


def _setup() -> None:
    child_setup()
    os.nice(19)
