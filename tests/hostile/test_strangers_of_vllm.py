"""What a run whose rollout engine is vLLM listens on: a whole run of two ranks that sample together."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.harness import ROOT
from tests.hostile.runs_of_ranks import planned, require_nothing_listens_but_lead_and_gloo
from tests.local_runs import QUICK
from verl_slurm.trainer.quickstart import tiny_model as quickstart_model

pytestmark = [
    pytest.mark.torch,
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="no vLLM here: make vllm, then .venv-vllm/bin/python"
    ),
]


@pytest.mark.scenario("SEC01")
def test_nothing_of_vllm_listens_but_gloo_on_the_nodes_own_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart_model, "_WARM_STEPS", 20)
    model = quickstart_model.build_model(tmp_path / "wide", head_dim=32)
    engine = ("rollout.engine=vllm", "rollout.tensor_parallel_size=2", "distributed.nodes=1")
    config = ROOT / "configs/quickstart.yaml"
    paths = planned(config, tmp_path / "run", *QUICK, f"model.path={model}", *engine)
    require_nothing_listens_but_lead_and_gloo(paths)
