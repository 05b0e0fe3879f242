"""Starts that strangers among the ranks spoil: no crash of the program, waited out, then tried on other nodes."""

from pathlib import Path

import pytest
from verl_slurm_daemon.decide import actions as act, inputs
from verl_slurm_daemon.decide.lead_model import Limits, Model
from verl_slurm_daemon.decide.policy import decide

from tests.hostile.runs_of_ranks import living, prepared
from tests.journals import make_event, read_events
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.journal.history import History
from verl_slurm.wire.messages import RankRefused

pytestmark = [pytest.mark.scenario("SEC19"), pytest.mark.slow]

LIMITS = Limits(crash_budget=0, backoff_s=1.0, no_progress_limit=1)

_PROGRAM = """
import os, sys
from pathlib import Path
from verl_slurm.wire.environment import CONTROL_VARIABLE
from verl_slurm.wire.messages import StrangerMet
from verl_slurm.wire.store_line import StoreLine
if os.environ["RANK"] == "0" and not os.path.exists("MARK"):
    open("MARK", "w").close()
    StoreLine(Path(os.environ[CONTROL_VARIABLE])).call(StrangerMet(call=0, rank=0, peers="in the place of rank 1: eve"))
    os._exit(12)
sys.exit("broken")
"""


def test_a_start_that_met_a_stranger_is_not_counted_as_a_crash_of_the_program(tmp_path: Path) -> None:
    paths = prepared(tmp_path, _PROGRAM.replace("MARK", str(tmp_path / "met")), "daemon.no_progress_limit=1")
    with living(paths) as process:
        said, _ = process.communicate(timeout=300)
    events = read_events(paths)
    told = [(e["event"], e.get("kind")) for e in events if e["event"] in ("restart", "stranger", "crash")]
    assert told == [
        ("restart", None),
        ("stranger", None),
        ("crash", "stranger"),
        ("restart", None),
        ("crash", "crash"),
    ], said
    assert process.returncode == ExitCode.NO_PROGRESS  # of the program, which is broken


def started(strangers: int = 0) -> Model:
    return decide(Model(LIMITS), inputs.Ready(2, strangers)).model


def met(model: Model) -> tuple[Model, list[act.Action]]:
    """A rank that met a stranger, what its peers say of that, and the end of the start."""
    done: list[act.Action] = []
    raised = RankRefused(rank=1, exit_code=22, reason="connection reset", place="train.py:3")
    for event in (
        inputs.StrangerFound("n1", "rank 0: in the place of rank 1"),
        inputs.RankSaid(raised),
        inputs.NodeFailed("n1", "rank 0 ended with 12"),
        inputs.RanksEnded(1),
    ):
        decision = decide(model, event)
        model = decision.model
        done += [action for action in decision.actions if not isinstance(action, act.Note)]
    return model, done


def test_strangers_are_waited_out_and_then_left_behind_with_their_node() -> None:
    model, waits = started(), []
    while True:
        model, done = met(model)
        assert done[0] == act.TakeDown()
        if isinstance(done[1], act.AskRequeue):
            break
        assert isinstance(done[1], act.Pause)
        waits.append(done[1].seconds)
        model = decide(model, inputs.BackoffOver(0)).model
    assert waits == [5.0, 10.0, 20.0, 40.0]
    assert done[1] == act.AskRequeue(avoid=("n1",), delay_s=30)


def delay(strangers: int) -> act.Action:
    """What ends a job all of whose starts met strangers, as those before it did."""
    model = started(strangers)
    for _ in range(LIMITS.stranger_budget):
        model = decide(met(model)[0], inputs.BackoffOver(0)).model
    return met(model)[1][-1]


def test_each_job_that_strangers_stop_waits_longer_and_one_day_it_is_held() -> None:
    each = [delay(5 * jobs) for jobs in range(25)]
    assert all(isinstance(action, act.AskRequeue) for action in each[:24])
    waits = [action.delay_s for action in each[:24] if isinstance(action, act.AskRequeue)]
    assert waits[:8] == [30, 60, 120, 240, 480, 960, 1920, 3600]
    assert set(waits[8:]) == {3600}
    assert isinstance(each[24], act.AskRequeue)
    assert each[24].hold


@pytest.mark.parametrize(
    "first", [inputs.NodeFailed("n2", "rank 1 was killed"), inputs.StrangerFound("n1", "x")]
)
def test_a_stranger_is_the_reason_whichever_word_comes_first(first: inputs.Input) -> None:
    model, done = met(decide(started(), first).model)
    assert done[-1] == act.Pause(5.0)
    assert [kind for kind, _ in model.failed] == ["stranger"]


def test_what_the_trainer_refuses_stays_refused_whatever_strangers_do() -> None:
    refused = decide(
        started(), inputs.RankSaid(RankRefused(rank=0, exit_code=int(ExitCode.DATA), reason="x"))
    ).model
    assert met(refused)[1][-1] == act.Exit(ExitCode.DATA, "x")


def test_strangers_are_counted_apart_from_crashes_until_there_is_progress() -> None:
    model = decide(started(50), inputs.SaveReadBack("step_000001", True, "")).model
    assert model.strangers == 0
    begun, crash = make_event("restart", progress="a"), make_event("crash", kind="crash")
    stranger = make_event("crash", kind="stranger")
    lived = [begun, stranger, begun, crash, begun, stranger]
    assert (History(lived).stuck, History(lived).strangers) == (1, 2)
    for news in (make_event("submitted"), make_event("restart", progress="b")):
        after = History([*lived, news])
        assert (after.stuck, after.strangers) == (0, 0)
