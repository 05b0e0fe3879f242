"""Sampling for verl on a CPU, for tests only: `VERL_USE_EXTERNAL_MODULES=...,tests.fakes.verl_cpu_rollout`.

It stands for vLLM, SGLang and TensorRT-LLM, with which verl samples: they want a GPU, or do not fit beside verl. verl's
registries are open, and this adds `rollout.name=hf_cpu`: an actor with a Hugging Face model, and an adapter that sends
it the weights. It is slow, and serves one replica a process.
"""

import asyncio
import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch
import verl.utils.model as verl_model
import verl.workers.engine.fsdp.transformer_impl as fsdp_engine
import verl.workers.rollout.base as rollout_base
from torch.distributed.fsdp import CPUOffloadPolicy
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput


class Sampler:
    """One replica's model."""

    def __init__(self, path: str, response_length: int, seed: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        ends = self._model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])
        self._most, self._seed, self._step = response_length, seed, 0
        self._seen: dict[tuple[Any, ...], int] = {}
        self._waits = 0

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        request_id: str,
        **_: object,
    ) -> TokenOutput:
        most = min(self._most, sampling_params.get("max_tokens") or self._most)
        temperature = sampling_params.get("temperature", 1.0) or 1.0
        key = (self._step, tuple(prompt_ids))
        nth = self._seen[key] = self._seen.get(key, -1) + 1
        seed = sampling_params.get("seed")  # with rollout.full_determinism
        draw = torch.Generator().manual_seed(
            hash((self._seed, *key, nth)) & 0x7FFFFFFF if seed is None else seed
        )
        tokens: list[int] = []
        log_probs: list[float] = []
        past, now = None, torch.tensor([list(prompt_ids)])
        with torch.no_grad():
            for _ in range(most):
                out = self._model(input_ids=now, past_key_values=past, use_cache=True)
                past = out.past_key_values
                log_prob = (out.logits[0, -1].float() / temperature).log_softmax(-1)
                token = int(torch.multinomial(log_prob.exp(), 1, generator=draw))
                tokens.append(token)
                log_probs.append(float(log_prob[token]))
                now = torch.tensor([[token]])
                await asyncio.sleep(0)
                if token in self._ends:
                    break
        extra = {"global_steps": self._step}
        output = TokenOutput(
            token_ids=tokens, log_probs=log_probs, stop_reason="completed", extra_fields=extra
        )
        if request_id.startswith("probe-"):  # asked whether it repeats itself: no response of the run
            return output
        pause_s = float(os.environ.get("VERL_TEST_SAMPLE_S", "0"))
        if pause_s:  # a step of a known length, for the tests of what can be reached in time
            await asyncio.sleep(pause_s)
        stagger_s = float(os.environ.get("VERL_TEST_STAGGER_S", "0"))
        if stagger_s:  # a step in whose middle some responses are finished and some are not
            self._waits += 1
            await asyncio.sleep(stagger_s * self._waits)
        if log := os.environ.get("VERL_TEST_SAMPLED"):  # what a test counts by: one line for each response
            with open(log, "a") as file:
                file.write(json.dumps([self._step, seed, tokens, time.time()]) + "\n")
        return output

    async def load(self, weights: dict[str, torch.Tensor], step: int | None) -> None:
        self._model.load_state_dict(weights, strict=False)
        self._step = self._step if step is None else step
        self._seen, self._waits = {}, 0

    async def nothing(self, *_: object, **__: object) -> None:
        pass

    wake_up = sleep = abort_all_requests = resume_generation = nothing
    clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing


class SamplerReplica(RolloutReplica):  # type: ignore[misc]
    async def launch_servers(self) -> None:
        actor = ray.remote(Sampler).options(
            name=f"hf_cpu_{self.replica_rank}", num_cpus=0, max_concurrency=64
        )
        server = actor.remote(self.model_config.path, self.config.response_length, self.config.seed or 0)
        await server.nothing.remote()
        self.servers, self._server_handle = [server], server
        self._server_address = f"local:{self.replica_rank}"


class SamplerAdapter(BaseRollout):  # type: ignore[misc]
    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any = None, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        size = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        self.replica_rank, self.rollout_rank = divmod(int(os.environ["RANK"]), size)
        self._server: Any = None

    async def resume(self, tags: object) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None, **_: object
    ) -> None:
        found = {}
        for name, weight in weights:  # on every rank: gathering it is collective
            if self.rollout_rank == 0:
                found[name] = weight.detach().to("cpu", torch.float32).clone()
        if self.rollout_rank == 0:
            self._server = self._server or ray.get_actor(f"hf_cpu_{self.replica_rank}")
            await self._server.load.remote(found, global_steps)


rollout_base._ROLLOUT_REGISTRY[("hf_cpu", "async")] = f"{__name__}.SamplerAdapter"
RolloutReplicaRegistry.register("hf_cpu", lambda: SamplerReplica)


def _load_value_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    """verl's own asks for flash attention."""
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path,
        dtype=torch_dtype,
        config=model_config,
        attn_implementation="sdpa",
        trust_remote_code=trust_remote_code,
    )


verl_model.load_valuehead_model = _load_value_model
# The reference model asks for pinned memory, which needs an accelerator.
fsdp_engine.CPUOffloadPolicy = lambda pin_memory=True: CPUOffloadPolicy(pin_memory=False)
