"""A lead's port and nothing else, as a process: `python -m tests.hostile.lead_port LINKS`. Its memory is its own.

Says its port first; then, for each line that comes, what has happened so far, as a line of JSON. Ends with its input.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_slurm_daemon.link.channel import AgentLink, serve

from verl_slurm.base.errors import WireError

TOKEN, ATTEMPT = b"t" * 32, 7
ROOT = Path(__file__).parents[2]


class LeadPort:
    """The parent's end."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.port = int(self._line())

    def look(self) -> dict[str, Any]:
        """`delivered`, `broken` links, `refused` by reason, `links` now, `rss` in bytes, `fds`."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._line())
        return found

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the port is gone"
        return line


@contextlib.contextmanager
def lead_port(links: int = 8) -> Iterator[LeadPort]:
    """One that listens; it must end well, too."""
    argv = [sys.executable, "-m", "tests.hostile.lead_port", str(links)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    with subprocess.Popen(argv, cwd=ROOT, env=env, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield LeadPort(process)
            process.stdin.close()
            assert process.wait(60) == 0
        finally:
            process.kill()


async def _main(links: int) -> None:
    refused: Counter[str] = Counter()
    seen: Counter[str] = Counter()

    async def on_link(link: AgentLink) -> None:
        seen["all"] += 1
        seen["now"] += 1
        try:
            await link.messages(lambda message: seen.update(["delivered"]))
        except (WireError, OSError):
            seen["broken"] += 1
        finally:
            seen["now"] -= 1

    def say(what: object) -> None:
        print(what, flush=True)

    _, port = await serve("127.0.0.1", TOKEN, ATTEMPT, links, on_link, lambda why, _: refused.update([why]))
    say(port)
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        say(
            json.dumps(
                {
                    "delivered": seen["delivered"],
                    "broken": seen["broken"],
                    "links": seen["now"],
                    "all": seen["all"],
                    "refused": refused,
                    "rss": pages * os.sysconf("SC_PAGE_SIZE"),
                    "fds": len(os.listdir("/proc/self/fd")),
                }
            )
        )


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
