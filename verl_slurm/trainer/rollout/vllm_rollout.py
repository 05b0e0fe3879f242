"""Samples from the policy with vLLM, in the rank's own process.

The weights go from the sharded actor into vLLM's tensors one at a time, without a file, shared memory or an
IPC handle, and a failure is an exception here. vLLM changes its process: generators and the number of threads
are put back, its environment variables stay. torch and transformers must be versions that both support.

vLLM's "external launcher" makes one worker of each rank and shares our process group. With tensor
parallelism, `tensor_parallel_size` neighbouring ranks run one model together. Each gets the prompts of all;
they reach the same schedule and the same tokens independently, and each keeps its own rows.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig

from verl_slurm.base.errors import ConfigError
from verl_slurm.config.checks.rollout import max_model_len, sampling_dtype
from verl_slurm.config.schema import RunConfig
from verl_slurm.save.ranks import rng
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer.data import Batch
from verl_slurm.trainer.determinism import warned_only
from verl_slurm.trainer.objective.counter_rng import Purpose, uniforms
from verl_slurm.trainer.parallel.fsdp import whole_parameters

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the second one takes no logits processors (0.30)
    # They would go out to the internet.
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer sets the threads
}
_GENTLE_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR"}
"""Set unless the user has set them."""
_MIN_KV_BYTES = 64 << 20
_MAX_REASON = 500
"""Characters of vLLM's message to keep; a pydantic error's first line says nothing."""
_BLOCK = 128
"""Tokens in a block of vLLM's cache, at most."""


class _Asked(msgspec.Struct, frozen=True):
    """One response that a rank of the group requests."""

    prompt: list[int]
    uniforms: list[float]


_Made = tuple[list[int], list[float]]
"""Tokens, and the log probability of each."""


class VLLMRollout:
    """vLLM with our noise; the interface is `trainer.rollout.engines.RolloutEngine`.

    Args:
        model_path: Hugging Face model directory; only its shape matters, `sync` brings the weights.
        eos_ids: the tokens that end a response (`export.causal_lm.end_tokens`).

    Raises:
        ConfigError: vLLM does not take this model or these settings.
    """

    def __init__(
        self,
        model_path: Path,
        config: RunConfig,
        *,
        eos_ids: Sequence[int],
        pad_id: int,
        device: torch.device,
        ranks: Collective,
    ) -> None:
        self._config, self._eos_ids, self._pad_id, self._ranks = config, eos_ids, pad_id, ranks
        self._device = device
        self._group_size = config.rollout.tensor_parallel_size
        os.environ.update(_ENVIRONMENT)
        for name, value in _GENTLE_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # vLLM brings kernels without a deterministic form. It samples and trains nothing, so a warning is enough.
        with _process_as_before(), warned_only(device):
            try:
                # Imported here: it takes seconds, and is an extra.
                from vllm import LLM

                from verl_slurm.trainer.rollout.vllm_sampler import CounterSampling

                if device.type == "cpu":
                    _without_shared_memory()
                self._llm: Any = LLM(
                    str(model_path),
                    logits_processors=[CounterSampling],
                    **_arguments(config, model_path, device),
                )
            except (ValueError, ImportError) as error:
                if "memory" in str(error).lower():
                    raise  # a crash: the process that holds it may be gone at the next start
                raise ConfigError(
                    "vLLM cannot start",
                    where=model_path,
                    found=" ".join(str(error).split())[:_MAX_REASON],
                    remedy="correct what it names, or set rollout.engine=hf",
                ) from error

    @property
    def collective(self) -> bool:
        """With tensor parallelism the ranks of a group need each other for every token."""
        return self._group_size > 1

    def sync(self, actor: nn.Module) -> None:
        """Copies the actor's weights. Collective where the actor is sharded; once a step."""
        weights = whole_parameters(actor)
        with torch.no_grad(), self._manner():
            # vLLM gathers a layer's tensors before it copies them: a layer exists twice, not the model.
            # Tensor by tensor from the actor: no file, and no second whole copy of the model.
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            for _ in weights:  # a tensor vLLM did not ask for is a collective that the other ranks wait in
                pass

    @torch.no_grad()
    def generate(
        self,
        prompts: Batch,
        step: int,
        *,
        temperature: float | None = None,
        purpose: Purpose = Purpose.SAMPLE_TOKEN,
    ) -> Batch:
        """As `HFRollout.generate`. Collective if `collective` says so; then with the same options on all ranks."""
        rollout = self._config.rollout
        num_tokens = rollout.max_new_tokens
        ids: list[int] = prompts["sample_id"].tolist()
        # Keyed by sample, not by row: a response is the same in any batch and after any restart.
        noise = uniforms(self._config.seed, step, ids, num_tokens, purpose=purpose).tolist()
        mine = [
            # vLLM takes prompts without padding.
            _Asked(ids[mask].tolist(), row)
            for ids, mask, row in zip(
                prompts["prompt_ids"], prompts["prompt_mask"].bool(), noise, strict=True
            )
        ]
        # None alone stands for the configuration's: 0 is greedy.
        made = self._of_group(mine, rollout.temperature if temperature is None else temperature)
        # Of full width, as the other engine's: the parts of a step are joined.
        response = torch.full((len(mine), num_tokens), self._pad_id, dtype=torch.int64)
        response_mask = torch.zeros((len(mine), num_tokens), dtype=torch.bool)
        logprobs = torch.zeros((len(mine), num_tokens), dtype=torch.float32)
        for row, (tokens, its_logprobs) in enumerate(made):
            response[row, : len(tokens)] = torch.tensor(tokens)
            response_mask[row, : len(tokens)] = True
            logprobs[row, : len(tokens)] = torch.tensor(its_logprobs)
        return {**prompts, "response_ids": response, "response_mask": response_mask, "logprobs": logprobs}

    def _of_group(self, mine: list[_Asked], temperature: float) -> list[_Made]:
        """Samples the requests of each rank of our tensor-parallel group in turn; returns our own."""
        if self._group_size == 1:
            return self._sample(mine, temperature)
        # Over all ranks, though the group's are needed: `ranks` has one group, and each rank comes here equally often.
        everybody = self._ranks.values(mine, list[_Asked])
        start = self._ranks.rank // self._group_size * self._group_size
        # Each micro-batch by itself, never as one batch: after an interruption the ledger has some of the group's and
        # not others, and kernels may round by the size of a batch.
        made = [self._sample(theirs, temperature) for theirs in everybody[start : start + self._group_size]]
        return made[self._ranks.rank - start]

    def _sample(self, asked: list[_Asked], temperature: float) -> list[_Made]:
        """Returns tokens and their log probabilities, in the order of the requests."""
        from verl_slurm.trainer.rollout.vllm_sampler import request

        if not asked:
            return []
        with self._manner():
            outputs = self._llm.generate(
                [{"prompt_token_ids": one.prompt} for one in asked],
                [request(one.uniforms, temperature, self._eos_ids) for one in asked],
                use_tqdm=False,
            )
        made = []
        for output in outputs:
            best = output.outputs[0]
            tokens = list(best.token_ids)
            made.append((tokens, [said[t].logprob for t, said in zip(tokens, best.logprobs, strict=True)]))
        return made

    @contextmanager
    def _manner(self) -> Iterator[None]:
        """Keeps vLLM's own kernels, and with `enforce_eager` disables torch.compile."""
        with warned_only(self._device):
            if not self._config.rollout.enforce_eager:
                yield
                return
            # vLLM compiles a part of its sampler even with enforce_eager.
            with torch.compiler.set_stance("force_eager"):
                yield


def _without_shared_memory() -> None:
    """Makes vLLM's ranks on a CPU talk over the process group, as those on different machines do."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    # vLLM 0.30 makes segments in /dev/shm whose names are the same for every job of the external launcher.
    # There is no setting for it. A killed run leaves its segments, its next start fails on them ("create shm in
    # SHMManager failed. errno: 17"), and two runs on one node would share them.
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _: False


def _arguments(config: RunConfig, model_path: Path, device: torch.device) -> dict[str, Any]:
    rollout = config.rollout
    size, longest = rollout.tensor_parallel_size, max_model_len(config)
    num_seqs = rollout.micro_batch_size_per_device
    arguments: dict[str, Any] = {
        "dtype": sampling_dtype(config),
        # vLLM seeds numpy with it, which takes 32 bits. No sample depends on it.
        "seed": config.seed % (1 << 32),
        "tensor_parallel_size": size,
        "enforce_eager": rollout.enforce_eager,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "max_model_len": longest,
        # A micro-batch in one schedule: how it were divided could change the rounding.
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": max(longest, 8192),
        "load_format": "dummy",  # sync brings the weights
        # Prompts come as token ids.
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "generation_config": "vllm",  # the directory's own (top_p, ...) would change the distribution
        "logprobs_mode": "processed_logits",
        # The sampler needs the tokens so far.
        "async_scheduling": False,
        # Its blocks belong to former weights.
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    if dist.is_initialized():
        # One worker in each rank, over the process group that is there: vLLM opens no port.
        arguments["distributed_executor_backend"] = "external_launcher"
    if device.type == "cpu":
        # On a CPU the share would be one of all memory, for each rank.
        arguments["kv_cache_memory_bytes"] = _kv_bytes(model_path, config, num_seqs)
    return arguments


def _kv_bytes(model_path: Path, config: RunConfig, num_seqs: int) -> int:
    """Returns the bytes of cache for all sequences of a micro-batch at full length, whole blocks, on one rank."""
    shape = AutoConfig.from_pretrained(str(model_path), local_files_only=True).get_text_config()
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    # Keys and values.
    per_token = 2 * shape.num_hidden_layers * -(-heads // config.rollout.tensor_parallel_size) * width
    # Whole blocks for every sequence: short of them, vLLM preempts a sequence and computes it again.
    blocks = -(-max_model_len(config) // _BLOCK) + 1
    return int(
        max(
            _MIN_KV_BYTES,
            num_seqs * blocks * _BLOCK * per_token * getattr(torch, sampling_dtype(config)).itemsize,
        )
    )


@contextmanager
def _process_as_before() -> Iterator[None]:
    """Puts back the generators and `torch.set_num_threads`, which vLLM's start changes."""
    # The function itself, too: on a CPU vLLM puts another in its place.
    generators, threads, set_threads = rng.capture(), torch.get_num_threads(), torch.set_num_threads
    try:
        yield
    finally:
        # The function first: vLLM's own would ignore the next line with a warning.
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        # vLLM seeds all of them, and their state is a part of each checkpoint.
        rng.restore(generators)
