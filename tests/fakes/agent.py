"""An agent's end of a guest's line, in the test's own process: the socket, the page, and what a launcher sets.

Socket and page are real. It stands for the agent's process: it starts no rank, answers no lead, and reads what the one
guest has said at the end, in the order of sending. A real agent would pass on its own digest of that.
"""

import select
import socket
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from verl_slurm_daemon.agent.rank_socket import parse_packet

from verl_slurm.base.paths import RunPaths
from verl_slurm.wire.client import MAX_MESSAGE, SOCKET_NAME
from verl_slurm.wire.control_page import PAGE_NAME, ControlPage
from verl_slurm.wire.messages import FromRank, SaveRequest


class Agent:
    """Listens to one guest of a run."""

    def __init__(self, paths: RunPaths, *, attempt: int = 1, resume: str = "") -> None:
        self._place = tempfile.TemporaryDirectory(prefix="guest-")  # a socket's path may have 108 bytes
        control = Path(self._place.name)
        self.page = ControlPage.create(control / PAGE_NAME)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(control / SOCKET_NAME))
        self._listener.listen(4)
        self.environ = {
            "VERL_SLURM_CONTROL": str(control),
            "VERL_SLURM_RUN": str(paths.root),
            "VERL_SLURM_ATTEMPT": str(attempt),
            "VERL_SLURM_RESUME": resume,
            "RANK": "0",
            "WORLD_SIZE": "1",
        }
        self._ask = 0

    def ask(self, *, stop: bool = False, seconds_left: float | None = None) -> int:
        """A request to save; returns its number."""
        self._ask += 1
        self.page.post(SaveRequest(request_id=self._ask, stop=stop, seconds_left=seconds_left))
        return self._ask

    @property
    def was_called(self) -> bool:
        """Whether a guest has opened a line that was not heard yet."""
        return bool(select.select([self._listener], [], [], 0)[0])

    def heard(self) -> list[FromRank]:
        """All that the one guest has said, when it has closed its line."""
        connection, _ = self._listener.accept()
        with connection:
            found = []
            while packet := connection.recv(MAX_MESSAGE):
                found.append(parse_packet(packet))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        self.page.close()
        self._place.cleanup()
