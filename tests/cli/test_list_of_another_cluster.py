"""A run of another Slurm cluster is said to be there, and not called gone: job numbers of two clusters are alike."""

import json
import sys
from pathlib import Path

import pytest

from tests.many_runs import make_run
from tests.processes import captured


@pytest.mark.scenario("USE-SMALL")
@pytest.mark.parametrize(("cluster", "shown"), [("other", "on other"), ("here", "gone")])
def test_a_run_of_another_cluster_is_listed_with_its_cluster(
    tmp_path: Path, cluster: str, shown: str
) -> None:
    root = make_run(tmp_path / "runs" / "a", "running").root
    status = json.loads((root / "status.json").read_text())
    (root / "status.json").write_text(json.dumps(status | {"slurm": cluster}))
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, says in (("squeue", ""), ("scontrol", "ClusterName             = here")):
        (tools / name).write_text(f"#!/bin/sh\necho '{says}'\n")
        (tools / name).chmod(0o755)
    argv = [sys.executable, "-m", "verl_slurm.cli", "list", str(tmp_path / "runs"), "--json"]
    done = captured(argv, env={"PATH": str(tools)}, timeout=120, check=True)
    assert json.loads(done.stdout)[0]["state"] == shown
