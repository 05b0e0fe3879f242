"""A checkpoint of a tiny Qwen2, actor and critic trained for two updates, saved as the trainer saves it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.save.parts import provenance, runtime
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.specification import CHAT_TEMPLATE, SCHEMA_VERSION
from verl_slurm.checkpoint.format.state_schema import current_schema, render_schema
from verl_slurm.config.load import dump
from verl_slurm.config.schema import ModelConfig, RunConfig, TrainConfig
from verl_slurm.export import exporting
from verl_slurm.export.exporting import Wish


class Trained:
    """What was saved, still alive, and where it lies."""

    def __init__(self, root: Path, *, tied: bool) -> None:
        import torch
        from transformers import Qwen2ForCausalLM

        from verl_slurm.save.ranks.tensors import initialise_adamw
        from verl_slurm.trainer.models import load_causal_lm, load_critic
        from verl_slurm.trainer.quickstart.tiny_model import _config, _tokenizer

        self.base, self.paths = root / "base", RunPaths(root / "run")
        self.paths.root.mkdir(parents=True)
        tokenizer = _tokenizer()
        config = _config(tokenizer)
        # vLLM's CPU kernels want heads of 32 and more; wide weights, so that greedy tokens are not all the same.
        config.hidden_size, config.initializer_range, config.tie_word_embeddings = 128, 0.2, tied
        torch.manual_seed(5)
        Qwen2ForCausalLM(config).save_pretrained(str(self.base))
        tokenizer.save_pretrained(str(self.base))

        self.actor, self.critic = load_causal_lm(self.base), load_critic(self.base)
        self.ids = torch.arange(40, 56).reshape(2, 8)
        self.optimizers = {}
        for role, model in (("actor", self.actor), ("critic", self.critic)):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, weight_decay=0.1)
            initialise_adamw(optimizer)
            for _ in range(2):
                model(input_ids=self.ids).logits.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            self.optimizers[role] = optimizer
        self.config = msgspec.structs.replace(
            RunConfig(name="tiny"),
            model=ModelConfig(path=str(self.base)),
            train=TrainConfig(weight_decay=0.1, actor_lr=0.01, critic_lr=0.02),
        )

    def save(self, step: int = 2, **changes: Any) -> Path:
        """Commit a checkpoint; `changes`: config=, topology=, fingerprint=, frozen=, encryption=, template=."""
        from verl_slurm.save.ranks.collective import Collective
        from verl_slurm.save.ranks.saver import CheckpointSaver, SaveContents
        from verl_slurm.save.ranks.tensors import model_tensors, optimizer_tensors
        from verl_slurm.trainer.objective.optimizers import schedule_record

        config = changes.get("config", self.config)
        schema = current_schema()
        parts = {r: (m, self.optimizers[r]) for r, m in (("actor", self.actor), ("critic", self.critic))}
        history = [{"step": float(n), "reward": n / 10, "kl": 0.5} for n in range(1, step + 1)]
        state = runtime(
            step,
            kl_window=[0.5, 0.25],
            rollouts={"response_ids": np.zeros((3, 4), dtype=np.int64)},
            history=history,
        )
        layout = {"data_root": "/data", "data_files": changes.get("files", {"a.jsonl": "0" * 64})}
        texts = {
            "scheduler.json": schedule_record(config.train, step),
            "metadata.json": {"index": 0, "rollout_offset": 8, "history": history},
            "orchestration.json": layout | {"began": "2024-07-26T08:00:00+00:00"},
        }
        template = {CHAT_TEMPLATE: changes["template"].encode()} if "template" in changes else {}
        contents = SaveContents(
            runtime=state,
            texts={name: json.dumps(value).encode() for name, value in texts.items()}
            | {"config.yaml": dump(config), SCHEMA_VERSION: render_schema(schema)}
            | template,
        )
        domains = {
            "actor": model_tensors(self.actor),
            "critic": model_tensors(self.critic),
            "optimizer": optimizer_tensors(parts),
        }
        known = {name: changes[name] for name in ("frozen", "topology") if name in changes}
        alone = Collective(None)
        saver = CheckpointSaver(
            self.paths,
            domains,
            provenance(dataset_fingerprint=changes.get("fingerprint", "0" * 64), **known),
            alone,
            attempt_check=lambda: None,
            encryption=changes.get("encryption"),
        )
        try:
            return self.paths.checkpoints / saver.begin(contents).result().name
        finally:
            saver.close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"), tied=False)


@pytest.fixture(scope="module")
def checkpoint(trained: Trained) -> Path:
    """Its checkpoint; not to be changed."""
    return trained.save()


@pytest.fixture
def make_trained(tmp_path: Path) -> Callable[..., Trained]:
    return lambda **options: Trained(tmp_path / "made", **options)


def wish(out: Path, model: Path, **changes: Any) -> Wish:
    fields: dict[str, Any] = {
        "to": "hf",
        "roles": ("actor",),
        "dtype": "keep",
        "is_first_model": True,
        "weight_decay": 0.1,
    }
    return Wish(out=out, model=model, **(fields | changes))


def fill_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the part that needs torch run in this process: the same code without two seconds of imports."""
    from verl_slurm.export import __main__ as child
    from verl_slurm.save.ranks.tensors import Tensors  # noqa: F401 - torch is there

    def fill(order: exporting.ExportOrder, progress: Any) -> int:
        peaks = [0]
        child.work(exporting.read_order(order.render()), lambda said: peaks.append(said.get("peak", 0)))
        return max(peaks)

    monkeypatch.setattr(exporting, "fill", fill)
