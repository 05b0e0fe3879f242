"""What goes after a save. The checkpoints here are manifests without files: whoever reads one finds it broken."""

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.builders import run_config, write_manifest
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.components import Components
from verl_slurm.checkpoint.format.state_schema import current_schema
from verl_slurm.checkpoint.store import pruning, verify
from verl_slurm.config.schema import RunConfig
from verl_slurm.runtime_state.format import Phase
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.saver import SaveContents, SavedCheckpoint
from verl_slurm.trainer import saving
from verl_slurm.trainer.saving import Checkpointer
from verl_slurm.trainer.state.position import Position, StepShape
from verl_slurm.trainer.state.train_state import TrainState, fresh_state

pytestmark = pytest.mark.torch


def _commit(
    paths: RunPaths, step: int, components: Components = (), metrics: Mapping[str, float] | None = None
) -> SavedCheckpoint:
    final = private_dir(paths.checkpoint(step))
    write_manifest(final, step, components=components, metrics=dict(metrics or {}) or msgspec.UNSET)
    return SavedCheckpoint(name=final.name, seconds=0.1, num_bytes=0)


class Attempt:
    """A Checkpointer whose saves cost nothing."""

    def __init__(
        self,
        paths: RunPaths,
        patch: pytest.MonkeyPatch,
        *,
        keep_last: int,
        keep_every: int = 0,
        keep_best: int = 0,
        resumed: str = "",
    ) -> None:
        self._paths, self._patch, self.ledger = paths, patch, _NoLedger()
        paths.root.mkdir(exist_ok=True)
        paths.orchestration.write_bytes(b"{}")
        self._checkpointer = Checkpointer(
            config=run_config(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best),
            paths=paths,
            shape=_any(),
            rank=0,
            saver=_Commits(paths),  # type: ignore[arg-type]
            ledger=self.ledger,  # type: ignore[arg-type]
            schema=_any(),
            attempt=take_attempt(paths, job_id="1", restart=0).attempt,
            resumed_from=resumed,
        )

    def save(self, step: int, value: float | None = None, phase: Phase = "step_end") -> list[int]:
        """Commit and clean up; the steps of what is left. `value`: what the step's evaluation found."""
        row = {"step": float(step)} | ({} if value is None else {"eval/reward": value})
        state = TrainState(Position(step, phase), fresh_state(RunConfig()).kl, [row])
        with self._patch.context() as patch:
            patch.setattr(saving, "capture_state", lambda *_, **__: step)
            patch.setattr(Checkpointer, "_texts", lambda *_: {})
            self._checkpointer.begin(state, tidy=True).result()
        return _steps(self._paths)

    def save_partial(self, step: int) -> list[int]:
        """The same with a partial checkpoint."""
        with self._patch.context() as patch:
            patch.setattr(saving, "capture_state", lambda *_, **__: step)
            patch.setattr(Checkpointer, "_texts", lambda *_: {})
            self._checkpointer.begin_partial(fresh_state(RunConfig()), ("actor",)).result()
        return _steps(self._paths.partial)


def _steps(paths: RunPaths) -> list[int]:
    return sorted(int(path.name[5:]) for path in paths.checkpoints.glob("step_*"))


class _Commits:
    """A saver whose saves are done when they are begun."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths

    def begin(
        self,
        contents: SaveContents,
        then: Callable[[Collective, SavedCheckpoint], None],
        *,
        seconds_left: float | None = None,
        components: Components = (),
        on_kept: object = None,
        on_part: object = None,
    ) -> Future[SavedCheckpoint]:
        step: Any = contents.runtime
        done: Future[SavedCheckpoint] = Future()
        done.set_result(
            _commit(self._paths.partial if components else self._paths, step, components, contents.metrics)
        )
        then(Collective(None), done.result())
        return done


class _NoLedger:
    def __init__(self) -> None:
        self.needed_from: list[int] = []

    def compact(self, before_step: int) -> int:
        self.needed_from.append(before_step)
        return before_step


def _any() -> Any:
    return None


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A run in which no file of a checkpoint can be read."""
    monkeypatch.setattr(verify, "read_checked", lambda *_, **__: pytest.fail("a checkpoint was read"))
    monkeypatch.setattr(pruning, "verify", lambda *_: pytest.fail("a checkpoint was verified"))
    return RunPaths(private_dir(tmp_path / "run"))


def test_pruning_after_a_save_reads_no_checkpoint(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Attempt(paths, monkeypatch, keep_last=2)
    assert [ours.save(step) for step in (1, 2, 3, 4)] == [[1], [1, 2], [2, 3], [3, 4]]


def test_each_checkpoint_has_the_chat_template_that_rendered_its_prompts(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Mapping[str, bytes]] = []

    class Keeps(_Commits):
        def begin(self, contents: SaveContents, *args: Any, **options: Any) -> Future[SavedCheckpoint]:
            saved.append(contents.texts)
            return super().begin(contents, *args, **options)

    monkeypatch.setattr(saving, "capture_state", lambda *_, **__: 1)
    paths.orchestration.write_bytes(b"{}")
    config = run_config()
    for template in ("{{ messages }}", None):
        ours = Checkpointer(
            config=config,
            paths=paths,
            shape=StepShape.of(config),
            rank=0,
            saver=Keeps(paths),  # type: ignore[arg-type]
            ledger=_NoLedger(),  # type: ignore[arg-type]
            schema=current_schema(),
            attempt=1,
            resumed_from="",
            template=template,
        )
        ours.begin(fresh_state(config), tidy=False).result()
        shutil.rmtree(paths.checkpoints)
    assert [texts.get("chat_template.jinja") for texts in saved] == [b"{{ messages }}", None]


def test_what_was_resumed_from_stays_beside_the_first_save_of_ours(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        _commit(paths, step)
    ours = Attempt(paths, monkeypatch, keep_last=1, resumed="step_000003")
    assert ours.save(4) == [3, 4]
    assert ours.save(5) == [4, 5]


def test_while_too_little_is_known_nothing_goes(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        _commit(paths, step)
    ours = Attempt(paths, monkeypatch, keep_last=1)
    assert ours.save(4) == [1, 2, 3, 4]
    assert ours.save(5) == [4, 5]


def test_many_short_lives_do_not_fill_the_disk(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    _commit(paths, 1)
    for step in range(2, 9):
        left = Attempt(paths, monkeypatch, keep_last=3, resumed=f"step_{step - 1:06d}").save(step)
        assert len(left) <= 3
    assert left == [6, 7, 8]


def test_a_checkpoint_that_the_daemon_set_aside_counts_no_more(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Attempt(paths, monkeypatch, keep_last=2)
    for step in (1, 2):
        ours.save(step)
    private_dir(paths.quarantine)
    paths.checkpoint(2).rename(paths.quarantine / "step_000002.x")
    assert ours.save(3) == [1, 3]


def test_one_in_every_so_many_is_kept_for_ever_and_holds_no_journal_back(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Attempt(paths, monkeypatch, keep_last=2, keep_every=4)
    for step in range(1, 11):
        left = ours.save(step)
    assert left == [4, 8, 9, 10]
    assert ours.ledger.needed_from[-1] == 9


def test_the_best_by_the_evaluation_is_kept_and_one_from_the_middle_of_a_step_has_no_value(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Attempt(paths, monkeypatch, keep_last=2, keep_best=1)
    values = [0.1, 0.7, None, 0.4, 0.2, None]
    for step, value in enumerate(values, start=1):
        left = ours.save(step, value)
    assert left == [2, 5, 6]
    assert ours.ledger.needed_from[-1] == 5
    # Its row is of the step before, and its weights are not.
    assert ours.save(7, 0.9, "update") == [2, 6, 7]
    assert ours.save(8) == [2, 7, 8]
    assert ours.save(9) == [2, 8, 9]


def test_partial_checkpoints_are_kept_in_bounds_and_never_counted_among_the_full_ones(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Attempt(paths, monkeypatch, keep_last=2, keep_every=4)
    ours.save(1)
    for step in range(2, 9):
        left = ours.save_partial(step)
    assert left == [4, 7, 8]
    assert ours.save(9) == [1, 9]


@pytest.mark.scenario("C01")
def test_one_that_lost_the_run_between_its_save_and_its_clean_up_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path / "run")
    late = Attempt(paths, monkeypatch, keep_last=1)
    assert [late.save(step) for step in (1, 2)] == [[1], [1, 2]]
    take_attempt(paths, job_id="2", restart=0)
    assert late.save(3) == [1, 2, 3], "the new owner may go on from any of them"
    assert "no longer owns the run" in capfd.readouterr().err
