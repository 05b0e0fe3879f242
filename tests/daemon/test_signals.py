"""A signal is heard, whatever else comes with it."""

import asyncio
import os
import signal

from verl_slurm_daemon.descendants import listen

STORM = 5000


def test_a_warning_in_a_storm_of_children_is_heard() -> None:
    """The storm fills the socket by which signals wake a loop; then comes the one that counts."""

    async def story() -> list[str]:
        loop, heard = asyncio.get_running_loop(), []
        children, warned = 0, asyncio.Event()

        def child() -> None:
            nonlocal children
            children += 1

        def warning() -> None:
            heard.append("warning")
            warned.set()

        listen(loop, signal.SIGCHLD, child)
        listen(loop, signal.SIGUSR1, warning)
        try:
            for _ in range(STORM):  # without an await: the loop is held up, by a disk say
                os.kill(os.getpid(), signal.SIGCHLD)
            os.kill(os.getpid(), signal.SIGUSR1)
            async with asyncio.timeout(30):
                await warned.wait()
        finally:
            loop.remove_signal_handler(signal.SIGCHLD)
            loop.remove_signal_handler(signal.SIGUSR1)
        assert children > 0
        return heard

    assert asyncio.run(story()) == ["warning"]
