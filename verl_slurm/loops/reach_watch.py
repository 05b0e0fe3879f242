"""Notices a request in the middle of a step, and answers at once if the step's end will come too late.

The loop looks at its control page at the ends of steps alone. If a step takes longer than the time left, each second of
waiting is lost. So a thread looks, four times a second, and answers for the loop. It polls because the page is memory,
and a write to it notifies no reader.
"""

import threading
from collections.abc import Callable

from verl_slurm.loops.session import Session

__all__ = ["ReachWatch"]

_LOOK_EVERY_S = 0.25


class ReachWatch:
    """A thread of rank 0.

    Args:
        session: asked for its request and its measurements; told when the answer is no.
        busy: whether a save is in progress. A no ends the ranks at once, and that save with them. So the watcher waits
            for it, as long as the daemon allows, and judges the request then.
    """

    def __init__(
        self, session: Session, *, busy: Callable[[], bool] = lambda: False, every_s: float = _LOOK_EVERY_S
    ) -> None:
        self._session, self._busy, self._every_s = session, busy, every_s
        self._over, self._lock = threading.Event(), threading.Lock()
        self._judged = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="reach", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def taken(self, request_id: int) -> None:
        """Records that the loop has heard the request at a step's end: the watcher no longer answers it."""
        with self._lock:
            self._judged = max(self._judged, request_id)

    def look(self) -> None:
        """Judges a new request, once, when it is first seen."""
        with self._lock:
            request = self._session.request()
            if request is None or request.request_id <= self._judged or self._busy():
                return
            self._judged = request.request_id
            if not request.stop:
                return  # no request is waiting
            found = self._session.reach(request)
            if not found.ok:
                why = f"the end of the step cannot be reached: {found.reason}"
                self._session.save_failed(request.request_id, why)

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self.look()
