"""What Slurm's settings mean for a run: every rule, from what scontrol prints."""

import pytest

from tests.journals import make_event
from verl_slurm.checks import Finding, worst
from verl_slurm.checks.cluster_rules import (
    SaveTime,
    expected_save,
    judge_cluster,
    judge_deadlines,
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


def test_a_sound_cluster_has_nothing_but_good_findings_for_each_partition() -> None:
    several = judge_deadlines(CONF, partition("REQUEUE", 30), config(), save(4.0), [partition("OFF", 0)])
    named = [f.found.startswith("partition ") for f in several if f.topic == "preemption"]
    assert named == [True, True]
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
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("distributed.device=cuda", "slurm.gpus_per_node=1"), "NCCL does not ask"),
        (("trainer.backend=verl", "trainer.entry=ppo"), "Ray asks for a token, the servers and NCCL do not"),
    ],
)
def test_neighbours_are_warned_of_with_what_asks_for_no_token_unless_nodes_are_exclusive(
    words: tuple[str, ...], told: str
) -> None:
    shared, alone = (
        of("neighbours", judge_cluster(CONF, partition(), config(*words, *more), None))
        for more in ((), ("slurm.extra.exclusive=true",))
    )
    assert (shared.verdict, alone.verdict) == ("warning", "good")
    assert told in shared.found.replace("\n", " ")
    assert "exclusive" in shared.remedy


@pytest.mark.parametrize(
    ("mode", "grace_s", "seconds", "conf", "verdict", "told"),
    [
        # Without a grace time KillWait is what there is.
        ("REQUEUE", 0, None, {}, "warning", ""),
        ("REQUEUE", 0, 20.0, {}, "good", ""),
        ("REQUEUE", 0, 20.0, {"KillWait": "10 sec"}, "warning", ""),
        # The daemon asks for the requeue, in the grace time or in KillWait: as good as a cluster that requeues.
        ("CANCEL", 30, 1.0, {}, "good", "PreemptMode=CANCEL"),
        ("CANCEL", 0, 20.0, {}, "good", ""),
        ("CANCEL", 0, None, {}, "warning", ""),
        ("CANCEL", 0, 20.0, {"KillWait": "10 sec"}, "warning", ""),
        # Where nothing ends a job no save is too long.
        ("OFF", 0, 10_000.0, {}, "good", "nothing preempts"),
        ("SUSPEND,GANG", 0, 10_000.0, {}, "good", "stands still"),
        ("REQUEUE", 0, 10_000.0, {"PreemptType": "preempt/none"}, "good", "nothing preempts"),
        # What a QOS decides is not told from the partition.
        ("OFF", 0, 1.0, {"PreemptType": "preempt/qos"}, "warning", "QOS"),
    ],
)
def test_a_preemption_is_judged_by_its_mode_and_the_time_that_it_leaves(
    mode: str, grace_s: int, seconds: float | None, conf: dict[str, str], verdict: str, told: str
) -> None:
    finding = preemption(mode, grace_s, seconds, **conf)
    assert finding.verdict == verdict
    assert told in finding.found


@pytest.mark.scenario("P07")
def test_a_save_that_outlasts_the_grace_time_is_warned_of_with_both_figures() -> None:
    finding = preemption("REQUEUE", 30, 28.0)
    assert finding.verdict == "warning"
    assert "27 s for a save of 28.0 s" in finding.found
    assert "checkpoint.every_steps" in finding.remedy
    assert preemption("REQUEUE", 30, 26.0).verdict == "good"
    greedy = of("preemption", judge_deadlines(CONF, partition(), config("daemon.save_margin_s=30"), None))
    assert greedy.verdict == "warning"
    assert "daemon.save_margin_s=30 leaves no time" in greedy.found


def test_a_warning_before_the_time_limit_that_is_too_short_names_a_better_one() -> None:
    findings = judge_deadlines(CONF, partition(), config("slurm.signal_lead_s=20"), save(19.0))
    assert of("time limit", findings).remedy == "slurm.signal_lead_s=46"
    assert of("time limit", judge_deadlines(CONF, partition(), config(), save(19.0))).verdict == "good"


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


def test_the_slowest_of_the_last_saves_counts_and_one_on_the_nodes_alone_does_not() -> None:
    took = [99.0, *map(float, range(1, 9))]
    events = [make_event("saved", num_bytes=9, seconds=seconds) for seconds in took]
    events += [make_event("saved", num_bytes=9, seconds=50.0, on_shared=False), make_event("saved")]
    found = measured_save(History(events))
    assert found is not None
    assert found.seconds == 8.0
    assert measured_save(History()) is None
    # Before the first save, the size at the measured speed.
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
