"""What Slurm's settings mean for a run: every rule, from what scontrol prints."""

import pytest

from tests.journals import make_event
from verl_slurm.checks import Finding, worst
from verl_slurm.checks.cluster_rules import (
    SaveTime,
    expected_save,
    judge_cluster,
    judge_deadlines,
    kill_wait_s,
    measured_save,
)
from verl_slurm.config.load import parse_config
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.history import History
from verl_slurm.slurm.facts import PartitionFacts

CONF = {
    "SLURM_VERSION": "22.05.8",
    "JobRequeue": "1",
    "PreemptType": "preempt/partition_prio",
    "KillWait": "30 sec",
    "SlurmdTimeout": "300 sec",
    "MinJobAge": "300 sec",
}


def config(*overrides: str) -> RunConfig:
    return parse_config(b"", "my.yaml", overrides)


def partition(mode: str = "REQUEUE", grace_s: int = 30) -> PartitionFacts:
    return PartitionFacts(
        name="gpu",
        state="UP",
        total_nodes=4,
        total_cpus=64,
        max_time_s=None,
        max_nodes=None,
        grace_s=grace_s,
        preempt_mode=mode,
        is_default=True,
    )


def save(seconds: float) -> SaveTime:
    return SaveTime(seconds=seconds, basis="as this test says")


def of(topic: str, findings: list[Finding]) -> Finding:
    (found,) = [finding for finding in findings if finding.topic == topic]
    return found


def preemption(mode: str, grace_s: int, seconds: float | None, **conf: str) -> Finding:
    known = None if seconds is None else save(seconds)
    return of("preemption", judge_deadlines(CONF | conf, partition(mode, grace_s), config(), known))


def test_of_several_partitions_each_is_judged_by_its_name() -> None:
    known = save(4.0)
    found = judge_deadlines(CONF, partition("REQUEUE", 30), config(), known, [partition("OFF", 0)])
    assert [f.topic for f in found].count("preemption") == 2
    assert all(f.found.startswith("partition ") for f in found if f.topic == "preemption")


def test_a_sound_cluster_has_nothing_but_good_findings() -> None:
    findings = judge_cluster(CONF, partition(), config(), save(4.0))
    assert worst(findings) == "good"
    assert [f.topic for f in findings] == [
        "version",
        "requeue",
        "preemption",
        "time limit",
        "lost node",
        "memory of jobs",
        "neighbours",
    ]


@pytest.mark.scenario("SEC01")
def test_neighbours_on_gpu_nodes_are_warned_of_unless_nodes_are_exclusive() -> None:
    gpus = ("distributed.device=cuda", "slurm.gpus_per_node=1")
    shared = of("neighbours", judge_cluster(CONF, partition(), config(*gpus), None))
    alone = of(
        "neighbours", judge_cluster(CONF, partition(), config(*gpus, "slurm.extra.exclusive=true"), None)
    )
    assert (shared.verdict, alone.verdict) == ("warning", "good")
    assert "exclusive" in shared.remedy


@pytest.mark.scenario("SEC01")
def test_neighbours_of_verls_ppo_are_told_of_with_what_asks_for_a_token_and_what_does_not() -> None:
    ppo = ("trainer.backend=verl", "trainer.entry=ppo")
    shared = of("neighbours", judge_cluster(CONF, partition(), config(*ppo), None))
    alone = of(
        "neighbours", judge_cluster(CONF, partition(), config(*ppo, "slurm.extra.exclusive=true"), None)
    )
    assert (shared.verdict, alone.verdict) == ("warning", "good")
    assert "Ray asks for a token, the servers and NCCL do not" in shared.found


@pytest.mark.scenario("P07")
def test_a_save_that_outlasts_the_grace_time_is_warned_of_with_both_figures() -> None:
    finding = preemption("REQUEUE", 30, 28.0)
    assert finding.verdict == "warning"
    assert "27 s for a save of 28.0 s" in finding.found
    assert "checkpoint.every_steps" in finding.remedy
    assert preemption("REQUEUE", 30, 26.0).verdict == "good"


def test_without_a_grace_time_kill_wait_is_what_there_is() -> None:
    assert preemption("REQUEUE", 0, None).verdict == "warning"
    assert preemption("REQUEUE", 0, 20.0).verdict == "good"
    assert preemption("REQUEUE", 0, 20.0, KillWait="10 sec").verdict == "warning"


def test_a_cluster_that_cancels_for_others_is_as_good_as_one_that_requeues() -> None:
    """The daemon asks for the requeue, in the grace time or in KillWait."""
    assert preemption("CANCEL", 30, 1.0).verdict == "good"
    assert preemption("CANCEL", 0, 20.0).verdict == "good"
    assert preemption("CANCEL", 0, None).verdict == "warning"
    assert preemption("CANCEL", 0, 20.0, KillWait="10 sec").verdict == "warning"
    assert "PreemptMode=CANCEL" in preemption("CANCEL", 0, 20.0).found


@pytest.mark.parametrize(("mode", "word"), [("OFF", "nothing preempts"), ("SUSPEND,GANG", "stands still")])
def test_where_nothing_ends_a_job_no_save_is_too_long(mode: str, word: str) -> None:
    finding = preemption(mode, 0, 10_000.0)
    assert finding.verdict == "good"
    assert word in finding.found


def test_a_partition_is_not_preempted_where_slurm_preempts_nothing() -> None:
    assert preemption("REQUEUE", 0, 10_000.0, PreemptType="preempt/none").verdict == "good"


def test_what_a_qos_decides_is_not_told_from_the_partition() -> None:
    finding = preemption("OFF", 0, 1.0, PreemptType="preempt/qos")
    assert finding.verdict == "warning"
    assert "sacctmgr" in finding.remedy


def test_a_warning_before_the_time_limit_that_is_too_short_names_a_better_one() -> None:
    findings = judge_deadlines(CONF, partition(), config("slurm.signal_lead_s=20"), save(19.0))
    assert of("time limit", findings).remedy == "slurm.signal_lead_s=46"
    assert of("time limit", judge_deadlines(CONF, partition(), config(), save(19.0))).verdict == "good"


def test_a_margin_as_long_as_the_grace_time_leaves_nothing() -> None:
    greedy = config("daemon.save_margin_s=30")
    finding = of("preemption", judge_deadlines(CONF, partition(), greedy, None))
    assert finding.verdict == "warning"
    assert "daemon.save_margin_s=30 leaves no time" in finding.found


@pytest.mark.parametrize(
    ("topic", "change", "verdict"),
    [
        ("version", {"SLURM_VERSION": "20.11.9"}, "warning"),
        ("version", {"SLURM_VERSION": "next"}, "warning"),
        ("version", {"SLURM_VERSION": "25.05.1"}, "good"),
        ("requeue", {"JobRequeue": "0"}, "good"),
        ("lost node", {"SlurmdTimeout": "0 sec"}, "warning"),
        ("memory of jobs", {"MinJobAge": "2 sec"}, "warning"),
    ],
)
def test_each_other_setting_is_judged_by_itself(topic: str, change: dict[str, str], verdict: str) -> None:
    assert of(topic, judge_cluster(CONF | change, partition(), config(), None)).verdict == verdict


def test_slurms_default_stands_for_what_is_not_shown() -> None:
    assert kill_wait_s({}) == 30


def test_the_slowest_of_the_last_saves_counts_and_one_on_the_nodes_alone_does_not() -> None:
    took = [99.0, *map(float, range(1, 9))]
    events = [make_event("saved", num_bytes=9, seconds=seconds) for seconds in took]
    events += [make_event("saved", num_bytes=9, seconds=50.0, on_shared=False), make_event("saved")]
    found = measured_save(History(events))
    assert found is not None
    assert found.seconds == 8.0
    assert measured_save(History()) is None


def test_before_the_first_save_the_size_at_the_measured_speed_is_expected() -> None:
    found = expected_save(30 * 10**9, 1.5e9)
    assert found.seconds == 20.0
    assert found.basis == "30 GB at 1500 MB/s, as measured just now"


def test_a_guest_saves_at_the_end_of_a_step_and_is_told_what_is_lost_where_that_comes_too_late() -> None:
    guest = config("trainer.backend=command", "trainer.command=[train.py]")

    def judged(seconds: float | None, grace_s: int = 30) -> Finding:
        known = None if seconds is None else save(seconds)
        return of("preemption", judge_deadlines(CONF, partition("REQUEUE", grace_s), guest, known))

    late = judged(300.0)
    assert late.verdict == "warning"
    assert "27 s for the end of a step and a save of 300.0 s" in late.found
    assert "requeued at once and goes back to the newest checkpoint" in late.remedy
    assert "ledger" not in late.remedy
    assert "local_dir" not in late.remedy
    assert judged(20.0).verdict == "good"
    assert "a step and a save" in judged(None).found
    assert "ledger" not in judged(None, grace_s=0).remedy
    limit = of("time limit", judge_deadlines(CONF, partition(), guest, save(300.0)))
    assert "the end of a step and a save takes 300.0 s" in limit.found
    assert limit.remedy == "slurm.signal_lead_s=608"
