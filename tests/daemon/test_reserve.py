"""A lead's threads are there before they are needed."""

import asyncio
import threading

import pytest
from verl_slurm_daemon.lead.lead_loop import keep_threads


def refuse(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_work_finds_a_thread_where_none_can_be_started_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> str:
        keep_threads(asyncio.get_running_loop())
        monkeypatch.setattr(threading.Thread, "start", refuse)
        try:
            return await asyncio.to_thread(lambda: threading.current_thread().name)
        finally:
            monkeypatch.undo()

    assert asyncio.run(story()).startswith("lead")


def test_without_any_thread_a_lead_starts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            keep_threads(asyncio.get_running_loop())

    asyncio.run(story())
