"""What a rank needs of its device: to be there, its kernels to be deterministic, its generator to come back."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch.nn.functional import dropout, scaled_dot_product_attention

from tests.trainer.test_grpo import GRPO
from verl_slurm.base.errors import ConfigError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import DistributedConfig, RunConfig
from verl_slurm.dataset.fingerprint.data_record import Fingerprint
from verl_slurm.runtime_state.codec import decode, encode
from verl_slurm.save.ranks import rng
from verl_slurm.trainer import determinism
from verl_slurm.trainer.place import DeviceLost, choose_device
from verl_slurm.trainer.state.orchestration import check_or_write, describe
from verl_slurm.trainer.state.position import StepShape
from verl_slurm.trainer.state.train_state import capture_state, fresh_state, restore_state

pytestmark = pytest.mark.torch


@pytest.fixture
def strict(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The device, settled as a rank settles it; afterwards all is as it was."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before[1])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    made = torch.device(device)
    if device == "cuda":
        torch.cuda.init()
    determinism.settle(made, deterministic=True)
    yield made
    torch.use_deterministic_algorithms(before[0])


def _draw(device: torch.device) -> list[float]:
    return [
        *torch.rand(3, device=device).tolist(),
        *torch.randn(3, device=device).tolist(),
        *dropout(torch.ones(16, device=device), 0.5).tolist(),
    ]


def test_the_generator_of_the_device_comes_back_from_a_runtime_state(strict: torch.device) -> None:
    """The GPU's generator through capture, file format and restore: the same numbers are drawn."""
    config = msgspec.structs.replace(RunConfig(), train=GRPO)
    shape = StepShape.of(config)
    rng.seed_all(5, 0)
    _draw(strict)
    data = encode(capture_state(fresh_state(config), shape, rank=0))
    first, again = _draw(strict), _draw(strict)
    assert first != again
    restore_state(decode(data), config, shape, where="here")
    assert _draw(strict) == first


def test_another_state_of_the_device_gives_other_numbers(strict: torch.device) -> None:
    """That its seeds are those of the rank."""
    rng.seed_all(5, 0)
    first = _draw(strict)
    rng.seed_all(5, 1)
    assert _draw(strict) != first


def test_a_masked_attention_gives_the_same_gradients_every_time(strict: torch.device) -> None:
    """Attention's backward pass, the one that differs where determinism only warns."""
    torch.manual_seed(0)
    made = {"device": strict, "requires_grad": True}
    query, key, value = (torch.randn(8, 4, 512, 64, **made) for _ in range(3))
    mask = torch.rand(8, 1, 512, 512, device=strict) < 0.9
    seen = set()
    for _ in range(2 if strict.type == "cpu" else 20):
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        grads = torch.autograd.grad(out.square().sum(), (query, key, value))
        seen.add(b"".join(grad.cpu().numpy().tobytes() for grad in grads))
    assert len(seen) == 1


def test_an_operator_without_a_deterministic_kernel_is_refused_by_name(strict: torch.device) -> None:
    """The refusal of an operator that is not deterministic."""
    x = torch.zeros(4, device=strict)
    with pytest.raises(ConfigError) as caught, determinism.explaining():
        x.put_(torch.tensor([0, 1], device=strict), torch.ones(2, device=strict))
    assert "found put_" in caught.value.one_line()
    with pytest.raises(RuntimeError, match="something else"), determinism.explaining():
        raise RuntimeError("something else")


def test_an_environment_that_makes_matrix_products_differ_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cuBLAS is told by the environment; needs no GPU."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(ConfigError, match="CUBLAS_WORKSPACE_CONFIG"):
        determinism.settle(torch.device("cuda"), deterministic=True)
    determinism.settle(torch.device("cuda"), deterministic=False)


def test_an_engine_with_kernels_of_its_own_is_let_be_and_the_trainer_is_strict_behind_it(
    strict: torch.device,
) -> None:
    """vLLM's work is not refused, and strictness comes back behind it."""
    with determinism.warned_only(strict):
        assert torch.is_deterministic_algorithms_warn_only_enabled() == (strict.type == "cuda")
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def _config(tmp_path: Path, wanted: str) -> RunConfig:
    shape = DistributedConfig(dp_size=1, device=wanted)  # type: ignore[arg-type]
    return msgspec.structs.replace(RunConfig(), run_dir=str(tmp_path), distributed=shape)


def _one_too_many(device: str) -> int:
    """A local rank for which there is no GPU."""
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("NOT RUN: there is a GPU here; not covered: a machine without one")
    return torch.cuda.device_count() if device == "cuda" else 0


def test_a_rank_for_which_there_is_no_gpu_is_refused_before_anything_is_begun(
    device: str, tmp_path: Path
) -> None:
    """More ranks on a node than it has GPUs."""
    rank = _one_too_many(device)
    with pytest.raises(ConfigError) as caught:
        choose_device(_config(tmp_path, "cuda"), rank)
    said = caught.value.one_line()
    assert ("fewer GPUs than ranks" if device == "cuda" else "no GPU that torch could use") in said
    if device == "cpu":
        assert choose_device(_config(tmp_path, "auto"), 0) == torch.device("cpu")
    else:
        assert choose_device(_config(tmp_path, "auto"), 0) == torch.device("cuda", 0)


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_run_that_had_a_gpu_and_finds_none_crashes_and_is_not_refused(
    device: str, wanted: str, tmp_path: Path
) -> None:
    """A node that has lost a GPU: neither the end of the run, nor a start on the CPU."""
    rank, config = _one_too_many(device), _config(tmp_path, wanted)
    first = describe(config, tmp_path, Fingerprint(digest="d", files={}), "gloo, nccl")
    check_or_write(RunPaths(private_dir(tmp_path)), first)
    with pytest.raises(DeviceLost) as caught:
        choose_device(config, rank)
    assert caught.value.exit_code is ExitCode.INTERNAL
    assert choose_device(_config(tmp_path, "cpu"), 0) == torch.device("cpu")


def test_a_rank_on_the_cpu_has_no_part_in_the_generators_of_gpus(device: str) -> None:
    """Its state names the device's generator exactly where it works on one."""
    if device == "cuda":
        torch.cuda.init()
    assert ("cuda" in rng.capture()) == torch.cuda.is_initialized()
