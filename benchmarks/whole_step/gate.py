"""What both sides of `benchmarks.tokens_per_second` are told, and the gate that every rank waits at between two steps.

A rank connects to a Unix socket, says a line of JSON behind each whole step, and goes on when it is told to. So the
systems take turns step by step, in processes that stay: one of them works, the others sleep in `readline`.
"""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The same for every system, but for `piece`."""

    model: str
    data: str
    directory: str
    """Of one system: the run, or TRL's output."""
    ranks: int
    threads: int
    """CPU threads of one rank."""
    steps: int
    """Whole steps in all, the first included, which nobody measures."""
    responses: int
    """Of one rank and step."""
    piece: int
    """Responses sampled at once, a safe point behind each piece. TRL samples all of a step at once."""
    group: int
    """Responses to one prompt."""
    mini: int
    """Responses that a rank puts into one optimizer update, in one forward and backward pass."""
    max_new_tokens: int
    prompt_tokens: int
    """Of the longest prompt; what ours are padded to. TRL pads to the longest of a batch."""
    temperature: float = 1.0
    learning_rate: float = 5e-4
    beta: float = 0.01
    clip: float = 0.2

    @property
    def updates(self) -> int:
        """Optimizer updates in one step."""
        return self.responses // self.mini

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class Said:
    """What one rank says of a step: response tokens it answers for, seconds of its phases, its mean reward.

    `cpu_s` is the gate's to fill in: CPU seconds of all threads of the process since it was last told to go on. They
    are nearly the same on a machine that others use, too.
    """

    tokens: int
    generate_s: float
    score_s: float
    update_s: float
    reward: float
    cpu_s: float = 0.0


class Gate:
    """A rank's end. Called by: benchmarks.whole_step.ours, benchmarks.whole_step.theirs."""

    def __init__(self, path: Path) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(path))
            self._file = connection.makefile("rw")  # which keeps it open
        self._cpu_s = time.process_time()

    def wait(self, said: Said) -> None:
        """Say how the step went, and sleep until the next may begin."""
        said = replace(said, cpu_s=time.process_time() - self._cpu_s)
        self._file.write(json.dumps(asdict(said)) + "\n")
        self._file.flush()
        if not self._file.readline():
            os._exit(1)  # the benchmark is gone
        self._cpu_s = time.process_time()

    def close(self) -> None:
        self._file.close()
