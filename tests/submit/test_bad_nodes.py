"""What a submission makes of the nodes that the user's runs left."""

from pathlib import Path

import pytest

from verl_slurm.checks.bad_nodes import folder, remember
from verl_slurm.config.load import parse_config
from verl_slurm.config.schema import RunConfig
from verl_slurm.slurm.batch import sbatch_parameters
from verl_slurm.slurm.facts import PartitionFacts
from verl_slurm.submit.check_list import CHECKS, Draft
from verl_slurm.submit.checks import slurm_answers as module
from verl_slurm.submit.checks.slurm_answers import SlurmSays, nodes_to_avoid
from verl_slurm.submit.relative_paths import Places
from verl_slurm.submit.submission_plan import SubmissionPlan

SAYS = SlurmSays(
    {"ClusterName": "c"},
    PartitionFacts(
        name="gpu",
        state="UP",
        total_nodes=3,
        total_cpus=8,
        max_time_s=None,
        max_nodes=None,
        grace_s=0,
        preempt_mode="OFF",
        is_default=True,
    ),
)


class Client:
    """Slurm's answers about three nodes that are alike."""

    async def usable_nodes(self, partition: str, reservation: str = "") -> dict[str, str]:
        assert partition == "gpu"
        return dict.fromkeys(("n1", "n2") if reservation == "R" else ("n1", "n2", "n3"), "a100")

    async def expand(self, nodes: str) -> list[str]:
        return nodes.split(",")


@pytest.fixture(autouse=True)
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SlurmClient", Client)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def config(nodes: int, *words: str) -> RunConfig:
    return parse_config(b"", "x.yaml", (f"distributed.nodes={nodes}", f"distributed.dp_size={nodes}", *words))


def note(*names: str) -> None:
    for name in names:
        remember("c", name, "GPUs: off the bus", Path("/runs/a"), 1.0)


def test_a_bad_node_is_excluded_beside_those_that_the_user_excludes() -> None:
    note("n1")
    wanted = config(1, "slurm.extra={exclude: n2}")
    avoids, found = nodes_to_avoid(wanted, SAYS)
    told = found[0].line
    assert avoids == ("n1",)
    assert told.startswith("the job avoids n1 until ")
    assert told.endswith("(GPUs: off the bus)")
    parameters = sbatch_parameters(wanted, avoids=avoids)["additional_parameters"]
    assert isinstance(parameters, dict)
    assert parameters["exclude"] == "n2,n1"


def test_where_too_few_nodes_would_be_left_the_oldest_are_let_in_again() -> None:
    note("n1", "n2")
    avoids, notes = nodes_to_avoid(config(2), SAYS)
    assert avoids == ("n2",)
    assert "may get n1 until" in notes[1].line
    assert nodes_to_avoid(config(1, "health.exclude_h=0"), SAYS) == ((), []), "it keeps no memory"


def test_a_bad_node_that_no_job_can_get_any_more_is_left_out_without_a_word() -> None:
    note("drained")
    assert nodes_to_avoid(config(3), SAYS) == ((), [])


@pytest.mark.parametrize(
    ("nodes", "words", "shell", "why"),
    [
        (1, ("slurm.extra={nodelist: n1}",), "", "it asks for this node"),
        (2, ("slurm.extra={reservation: R}",), "", "the reservation has too few other nodes like it"),
        (2, (), "R", "the reservation has too few other nodes like it"),
        (
            1,
            ("slurm.extra={nodefile: hosts}",),
            "",
            "slurm.extra.nodefile is hosts, which is no list of nodes",
        ),
    ],
)
def test_a_node_that_the_job_asks_for_is_not_excluded_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, nodes: int, words: tuple[str, ...], shell: str, why: str
) -> None:
    monkeypatch.setenv("SBATCH_RESERVATION", shell)
    note("n1")
    avoids, (told,) = nodes_to_avoid(config(nodes, *words), SAYS)
    assert avoids == ()
    assert told.line.endswith(why)


def test_a_damaged_record_is_told_and_stops_no_submission() -> None:
    note("n1")
    (folder("c") / "n1.json").write_bytes(b"{")
    avoids, (told,) = nodes_to_avoid(config(1), SAYS)
    assert avoids == ()
    assert told.line.startswith("a record of a bad node is passed over: ")


def test_the_cluster_that_answers_is_noted_for_submits_on_other_clusters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ask_slurm", lambda _: SAYS)
    plan = SubmissionPlan(config=config(1), cluster="slurm", new_run=True)
    draft = Draft(plan=plan, written=plan.config, places=Places(tmp_path))
    next(check for check in CHECKS if check.name == "Slurm").look(draft)
    assert plan.slurm == "c"
