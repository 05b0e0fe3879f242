"""Secrets that are recognised wherever they turn up, and whoever looks at what runs meanwhile."""

import base64
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from verl_slurm.base.errors import KeyRefused, PermissionRefused, WireError
from verl_slurm.base.paths import RunPaths

KEY = bytes.fromhex("c0ffee5eed1e55ca7a51adba5eba11f005ba11ca5cadedfacade0ddba11fee1d")
OLD_KEY = bytes.fromhex("d15ea5ed0b501e7ebea7ab1eca11ab1eca5cadedba0babfeed5eed1e55fab1e5")
SCRAPE_TOKEN = "scrape-canary-7d1f0a6b2c9e4835-scrape-canary-5b0d"

PLANTED = {
    "HF_TOKEN": "hf_CanaryHfAbCdEfGhIjKlMnOpQrStUvWx",
    "WANDB_API_KEY": "canarywandb0f1e2d3c4b5a69788796a5b4c3d2e1f0",
    "AWS_ACCESS_KEY_ID": "AKIACANARYCANARYCAN1",
    "AWS_SECRET_ACCESS_KEY": "canary/Aws+Secret0123456789abcdefghijKLM",
    "AWS_SESSION_TOKEN": "CanarySessionToken//////////wEaDGNhbmFyeQ==",
    "JUDGE_API_KEY": "sk-canary-judge-9c1185a5c5e9fc54612808977ee8f548",
}
"""What a user has in the environment: of hubs, trackers, the object store, and of his own reward."""

_PIECE = 16
"""Of a secret so much is a find: what cuts it in two, as a folded line or a limit does, hides nothing."""


def forms_of(secret: bytes | str) -> set[bytes]:
    """How a secret may stand somewhere: as it is, as hex, as base64; pieces of each."""
    raw = secret.encode() if isinstance(secret, str) else secret
    whole = [raw, raw.hex().encode(), raw.hex().upper().encode()]
    # Base64 of it inside something longer begins at any of three places.
    whole += [base64.b64encode(bytes(shift) + raw)[4:-4] for shift in (0, 1, 2)]
    return {text[at : at + _PIECE] for text in whole for at in range(0, len(text) - _PIECE + 1, _PIECE)}


def found_in(data: bytes, secrets: dict[str, bytes | str]) -> list[str]:
    """Whose forms are in `data`."""
    return sorted(name for name, value in secrets.items() if any(form in data for form in forms_of(value)))


def leaks(roots: Iterable[Path], secrets: dict[str, bytes | str]) -> list[str]:
    """`grep -r`: every file below the roots with a secret in its content or its name."""
    found = []
    for path in _walk(roots):
        data = bytes(path) + b"\n"
        with suppress(FileNotFoundError):  # gone meanwhile: a run that lives renames and removes
            info = path.lstat()
            if stat.S_ISREG(info.st_mode):
                data += path.read_bytes()
            elif stat.S_ISLNK(info.st_mode):
                data += os.readlink(bytes(path))
        found += [f"{name} in {path}" for name in found_in(data, secrets)]
    return found


def modes(roots: Iterable[Path]) -> list[str]:
    """What is not 0700 (a directory) or 0600 (a regular file) and ours, below the roots.

    A link has no mode; one that leads to something beside it, as submitit makes them, is as good as that.
    """
    wrong = []
    for path in _walk(roots):
        info = path.lstat()
        mode = stat.S_IMODE(info.st_mode)
        folder = stat.S_ISDIR(info.st_mode)
        good = (folder and mode == 0o700) or (stat.S_ISREG(info.st_mode) and mode in (0o600, 0o400))
        if stat.S_ISLNK(info.st_mode):
            good = path.resolve().parent == path.parent.resolve()
        if not good or info.st_uid != os.geteuid():
            wrong.append(f"{stat.filemode(info.st_mode)} uid {info.st_uid} {path}")
    return wrong


def _walk(roots: Iterable[Path]) -> Iterator[Path]:
    for root in roots:
        yield root
        yield from root.rglob("*")


@dataclass
class Seen:
    """A process of the run, as it was when it was last looked at."""

    environ: bytes = b""
    core_limit: str = ""
    dump_filter: str = ""


@dataclass
class Watcher:
    """Looks at /proc while a run is at work, as another user of the node could, and at what only we can see.

    Attributes:
        cmdlines: every command line that any process of this machine had.
        processes: those of the run, by command line.
        tokens: of every attempt, out of `RUN/control/lead.json`.
    """

    root: Path
    cmdlines: set[bytes] = field(default_factory=set)
    processes: dict[bytes, Seen] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Watcher":
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.1):
            self.look()

    def look(self) -> None:
        """Once."""
        from verl_slurm.wire.lead_file import read_lead_address

        with suppress(OSError, WireError, PermissionRefused, KeyRefused):
            self.tokens.add(read_lead_address(RunPaths(self.root)).token)
        for process in Path("/proc").iterdir():
            if not process.name.isdigit():
                continue
            with suppress(OSError):
                cmdline = (process / "cmdline").read_bytes()
                self.cmdlines.add(cmdline)
                if bytes(self.root) in cmdline.split(b"\0"):
                    limits = (process / "limits").read_text().splitlines()
                    seen = Seen(
                        (process / "environ").read_bytes(),
                        next(" ".join(line.split()[4:6]) for line in limits if "core file" in line),
                        (process / "coredump_filter").read_text().strip(),
                    )
                    if seen.dump_filter:  # empty: it has just died, and has no memory any more
                        self.processes[cmdline] = seen

    def processes_alive(self) -> list[psutil.Process]:
        """Of the run, at this moment."""
        return [p for p in psutil.process_iter(["cmdline"]) if str(self.root) in (p.info["cmdline"] or [])]

    @property
    def secrets(self) -> dict[str, bytes | str]:
        """The tokens, as `found_in` takes them."""
        return {f"control token {n}": bytes.fromhex(t) for n, t in enumerate(sorted(self.tokens))}
