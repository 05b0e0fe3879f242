"""The losses of others, TRL and verl, on one small batch: `python -m tests.trainer.others DIR` writes others.json.

DIR is where `pip install --no-deps --target DIR trl==1.16.0 accelerate datasets pandas pyarrow dill multiprocess xxhash
verl==0.9.1` has put them: neither is a dependency of ours, together they bring 300 MB for forty numbers. What they said
is kept in others.json, and test_against_others.py holds our functions to it; where TRL can be imported, it is also
asked again there.

TRL has no PPO any more (it left `trl.experimental` before 1.16), so PPO's terms are verl's, whose functions are those
of TRL's PPOTrainer by their own word.
"""

import importlib.abc
import importlib.machinery
import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from verl_slurm.trainer.objective.counter_rng import uniforms

RECORD = Path(__file__).with_name("others.json")
_LENGTHS = (6, 3, 1, 5, 4, 6, 2, 3)
Answer = dict[str, Any]
"""`loss` and the gradient of it (`grad`), or a tensor by its name; as lists of floats."""


class Settings:
    """Of all cases."""

    GROUP = 4
    LOW, HIGH = 0.2, 0.28
    VALUE_CLIP = 0.2
    GAMMA, LAMBDA = 0.97, 0.9
    KL_COEF = 0.04
    LENGTH = 7
    """Longer than the longest response."""


def batch() -> dict[str, Tensor]:
    """float64, so that what differs is not rounding: two groups of four responses, at most six tokens."""
    num, width = len(_LENGTHS), max(_LENGTHS)

    def noise(which: int, wide: int = width) -> Tensor:
        return torch.from_numpy(uniforms(0, which, range(num), wide))

    logprobs = -2.0 * noise(1)
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + 0.9 * (noise(2) - 0.5),
        "ref_logprobs": logprobs + 1.2 * (noise(3) - 0.5),
        "token_rewards": noise(4) - 0.4,
        "values": noise(5),
        "old_values": noise(6),
        "returns": 2.0 * noise(7),
        "scores": noise(8, 1).squeeze(1),
        "advantages": 3.0 * (noise(9) - 0.5),
        "mask": torch.arange(width) < torch.tensor(_LENGTHS).unsqueeze(1),
    }


def _answer(loss: Tensor, leaf: Tensor) -> Answer:
    (grad,) = torch.autograd.grad(loss, leaf)
    return {"loss": float(loss.detach()), "grad": grad.tolist()}


def of_trl() -> dict[str, Answer]:
    """GRPO's loss with the KL in it, as `GRPOTrainer` computes it, by its `loss_type`; and its advantages."""
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import nanstd

    given, answers = batch(), {}
    scores, mask = given["scores"], given["mask"]
    groups = scores.view(-1, Settings.GROUP)
    centred = scores - groups.mean(dim=1).repeat_interleave(Settings.GROUP)
    # As in _generate_and_score_completions, which is one piece of 600 lines.
    scaled = centred / (nanstd(groups, dim=1).repeat_interleave(Settings.GROUP) + 1e-4)
    answers["trl advantages std"] = {"advantages": (scaled.unsqueeze(1) * mask).tolist()}
    answers["trl advantages none"] = {"advantages": (centred.unsqueeze(1) * mask).tolist()}
    for loss_type in ("grpo", "bnpo", "dapo", "dr_grpo"):
        leaf = given["logprobs"].clone().requires_grad_()
        trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, leaf=leaf, **__: (leaf, leaf.detach(), None),
            aux_loss_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            importance_sampling_level="token",
            beta=Settings.KL_COEF,
            args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
            loss_type=loss_type,
            epsilon_low=Settings.LOW,
            epsilon_high=Settings.HIGH,
            use_vllm=False,
            model=SimpleNamespace(training=True),
            current_gradient_accumulation_steps=1,
            max_completion_length=Settings.LENGTH,
            accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x),
            _entropy_bonus_enabled=False,
            _metrics={"train": defaultdict(list)},
        )
        inputs = {
            "prompt_ids": torch.zeros(len(scores), 1, dtype=torch.int64),
            "prompt_mask": torch.ones(len(scores), 1, dtype=torch.int64),
            "completion_ids": torch.zeros(mask.shape, dtype=torch.int64),
            "completion_mask": mask.long(),
            "advantages": scaled,
            "old_per_token_logps": given["old_logprobs"],
            "ref_per_token_logps": given["ref_logprobs"],
            "num_items_in_batch": mask.sum(),
        }
        answers[f"trl loss {loss_type}"] = _answer(GRPOTrainer._compute_loss(trainer, None, inputs), leaf)
    return answers


def of_verl() -> dict[str, Answer]:
    """PPO's terms, the aggregations, and both estimators of the KL."""
    from verl.trainer.ppo import core_algos as theirs

    given, answers = batch(), {}
    mask = given["mask"].double()
    config = MagicMock(
        clip_ratio=Settings.LOW, clip_ratio_low=Settings.LOW, clip_ratio_high=Settings.HIGH, loss_agg_mode=""
    )
    config.get = lambda *_: 1e9  # of dual-clip PPO: off
    config.global_batch_info = {"loss_scale_factor": Settings.LENGTH}
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        leaf = given["logprobs"].clone().requires_grad_()
        loss, _ = theirs.compute_policy_loss_vanilla(
            given["old_logprobs"], leaf, given["advantages"], mask, mode, config
        )
        answers[f"verl policy {mode}"] = _answer(loss, leaf)
    leaf = given["values"].clone().requires_grad_()
    loss, _ = theirs.compute_value_loss(
        leaf, given["returns"], given["old_values"], mask, Settings.VALUE_CLIP
    )
    answers["verl value"] = _answer(loss, leaf)
    advantages, returns = theirs.compute_gae_advantage_return(
        given["token_rewards"] * mask, given["values"], mask, Settings.GAMMA, Settings.LAMBDA
    )
    answers["verl gae"] = {"advantages": (advantages * mask).tolist(), "returns": (returns * mask).tolist()}
    for estimator in ("k1", "k3"):
        kl = theirs.kl_penalty_forward(given["logprobs"], given["ref_logprobs"], estimator)
        answers[f"verl kl {estimator}"] = {"kl": (kl * mask).tolist()}
    return answers


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for what verl imports and none of these functions uses: ray, tensordict, ..."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec:
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return MagicMock(__spec__=spec, __path__=[], __name__=spec.name)

    def exec_module(self, module: Any) -> None:
        """Nothing to do."""


def main(directory: str) -> None:
    sys.path.append(directory)
    answers = of_trl()
    sys.meta_path.append(_Absent())
    for name in ("verl", "verl.workers", "verl.trainer.config", "verl.workers.config"):
        # Their packages import everything; only the files are wanted.
        sys.modules[name] = _Absent().create_module(importlib.machinery.ModuleSpec(name, None))
    sys.modules["verl.trainer.config"].AlgoConfig = SimpleNamespace  # asked for by isinstance
    sys.modules["verl"].__path__ = [f"{directory}/verl"]
    answers |= of_verl()
    lines = [f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in answers.items()]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1])
