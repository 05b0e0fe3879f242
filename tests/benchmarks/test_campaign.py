"""The table of campaigns in the docs is that of the rows that were kept, and rows are kept as they are said to be."""

import os
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks import campaign
from tests.processes import captured
from tests.slurm_cluster.cases import CASES, settings
from verl_slurm.config.load import load

ROOT = Path(__file__).parent.parent.parent
ROW = campaign.Row(
    case="ppo-tp",
    seed=7,
    interruptions={"requeue": 2, "kill_rank": 1},
    aside={"save": 1},
    steps=8,
    starts=4,
    restarts=2,
    rollouts=1024,
    tokens=9417,
    minutes=1.25,
    twin_minutes=0.5,
    load=3.0,
)


def test_a_case_has_one_row_its_latest_and_rows_stay_in_the_order_they_came(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    assert campaign.rows(file) == []
    other = replace(ROW, case="grpo", seed=1)
    for row in (ROW, other, replace(ROW, seed=8)):
        campaign.add(file, row)
    assert [(row.case, row.seed) for row in campaign.rows(file)] == [("ppo-tp", 8), ("grpo", 1)]


def test_the_table_counts_interruptions_by_kind_and_sums_them() -> None:
    lines = campaign.table([ROW, replace(ROW, case="grpo", interruptions={"requeue": 5})]).splitlines()
    assert lines[2].startswith("| `ppo-tp` | 7 | 3: kill_rank, 2 requeue; save | 8 | 4 | 1,024 | 9,417 |")
    assert lines[-1].startswith("| 2 cases |  | 8: kill_rank, 7 requeue; 2 save |  | 8 | 2,048 | 18,834 |")


def test_the_table_in_the_docs_is_that_of_the_rows_that_were_kept() -> None:
    kept = sorted((ROOT / "benchmarks" / "results").glob("campaign-*.json"))[-1]
    found = campaign.rows(kept)
    assert {row.case for row in found} == set(CASES)
    assert campaign.table(found) in (ROOT / "docs" / "campaign.md").read_text()


def test_both_algorithms_meet_both_engines_in_all_four_shapes() -> None:
    found = [load(ROOT / "configs" / "quickstart.yaml", settings(case, 5)) for case in CASES]
    shapes = [(c.distributed.dp_size, c.distributed.tp_size, c.distributed.pp_size) for c in found]
    combinations = {
        (c.train.algorithm, c.rollout.engine, *shape) for c, shape in zip(found, shapes, strict=True)
    }
    assert set(shapes) == {(2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2)}
    assert combinations == {
        (algorithm, engine, *shape)
        for algorithm in ("ppo", "grpo")
        for engine in ("hf", "vllm")
        for shape in shapes
    }
    assert len(found) == 16
    assert all(c.distributed.nodes == 2 for c in found), "on one node there is no other to lose"


@pytest.mark.skipif(shutil.which("make") is None, reason="NOT RUN: no make here")
def test_make_chooses_the_environment_that_has_what_the_cases_need() -> None:
    # `make test` hands its own flags and variables down.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    environment.pop("VENV", None)
    for cases, where in (("ppo-tp,grpo", ".venv"), ("ppo,grpo-vllm-pp", ".venv-vllm"), ("all", ".venv-vllm")):
        argv = ["make", "-n", "--no-print-directory", "campaign", f"CASES={cases}", "FLAVOUR=cpu"]
        said = captured(argv, cwd=ROOT, env=environment, timeout=60, check=True).stdout
        *_, last = said.splitlines()
        assert last.split()[0] == f"{where}/bin/python"
        assert f"VERL_SLURM_CASES={cases} " in said
