"""The alert rules, Alertmanager's configuration and the dashboard that ship."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.observability.conftest import RULES

pytestmark = [pytest.mark.prometheus, pytest.mark.slow]


def promtool(directory: Path) -> "subprocess.CompletedProcess[str]":
    argv = ["promtool", "test", "rules", "alerts_test.yml"]
    return subprocess.run(argv, cwd=directory, capture_output=True, text=True, timeout=60, check=False)


def test_the_rules_do_what_their_test_says() -> None:
    done = promtool(RULES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("was", "other"),
    [
        ("ago > 1800", "ago > 1700"),
        ("ago > 1800", "ago >= 1800"),
        ("percent > 95", "percent >= 95"),
        ("percent > 95", "percent > 98"),
        ("1800 and verl_gpu", "1800 or verl_gpu"),
        ("for: 1m", "for: 10m"),
        ("action: emergency_checkpoint", "action: none"),
        ("ratio < 0.8", "ratio < 0.4"),
        ('outcome="refused"', 'outcome="accepted"'),
    ],
)
def test_a_rule_that_is_changed_fails_its_test(tmp_path: Path, was: str, other: str) -> None:
    rules = (RULES / "alerts.yml").read_text()
    assert was in rules
    (tmp_path / "alerts.yml").write_text(rules.replace(was, other, 1))
    shutil.copy(RULES / "alerts_test.yml", tmp_path)
    assert promtool(tmp_path).returncode != 0


def test_prometheus_and_alertmanager_take_their_configurations() -> None:
    for argv in (
        ["promtool", "check", "config", "--syntax-only", "prometheus.yml"],
        ["promtool", "check", "rules", "--lint-fatal", "alerts.yml"],
        ["amtool", "check-config", "alertmanager.yml"],
    ):
        if shutil.which(argv[0]) is None:
            continue
        done = subprocess.run(argv, cwd=RULES, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_series_of_the_rules_and_the_dashboard_is_one_that_is_exported_and_documented() -> None:
    documented = set(re.findall(r"`(verl_\w+)", (RULES.parents[1] / "docs/reference-metrics.md").read_text()))
    dashboard = json.loads((RULES / "dashboard.json").read_text())
    used = (RULES / "alerts.yml").read_text() + json.dumps(dashboard)
    names = set(re.findall(r"\b(verl_\w+)", used))
    assert len(names) > 20
    assert names <= documented
