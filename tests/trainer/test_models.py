"""The networks: values and log probabilities by other means, and sharded as whole."""

import json
from pathlib import Path

import pytest
import torch

from tests.processes import torchrun
from verl_slurm.base.errors import DataError, Diverged
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.trainer.models import (
    build_models,
    clip_gradients,
    load_causal_lm,
    load_critic,
    logprobs_and_entropy,
    values,
)
from verl_slurm.trainer.parallel.gradients import require_finite

pytestmark = pytest.mark.torch

WORKER = Path(__file__).with_name("sharded_models.py")


def make_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "prompt_ids": torch.randint(0, 250, (2, 4), generator=generator),
        "prompt_mask": torch.tensor([[True] * 4, [False, False, True, True]]),
        "response_ids": torch.randint(0, 250, (2, 3), generator=generator),
        "response_mask": torch.tensor([[True] * 3, [True, True, False]]),
    }


def test_logprobs_are_those_of_the_unpadded_sequence_token_by_token(tiny: Path) -> None:
    model, batch, temperature = load_causal_lm(tiny), make_batch(), 0.7
    with torch.no_grad():
        logprobs, entropy = logprobs_and_entropy(model, batch, temperature=temperature)
        for n in range(2):
            prompt = batch["prompt_ids"][n][batch["prompt_mask"][n]]
            response = batch["response_ids"][n][batch["response_mask"][n]]
            logits = model(torch.cat([prompt, response])[None]).logits[0] / temperature
            for t, token in enumerate(response):
                distribution = torch.distributions.Categorical(logits=logits[len(prompt) - 1 + t])
                torch.testing.assert_close(logprobs[n, t], distribution.log_prob(token), rtol=0, atol=1e-5)
                torch.testing.assert_close(entropy[n, t], distribution.entropy(), rtol=0, atol=1e-5)


def test_a_fresh_critic_says_zero_and_then_what_its_head_says_before_each_token(tiny: Path) -> None:
    critic, batch = load_critic(tiny), make_batch()
    with torch.no_grad():
        assert (values(critic, batch) == 0).all()
        critic.get_parameter("score.weight").fill_(0.1)
        critic.get_parameter("score.bias").fill_(2.0)
        found = values(critic, batch)
        prompt, response = batch["prompt_ids"][1][2:], batch["response_ids"][1]
        hidden = critic.get_submodule("model")(torch.cat([prompt, response])[None]).last_hidden_state[0]
    expected = 0.1 * hidden.sum(dim=-1) + 2.0
    torch.testing.assert_close(found[1, :2], expected[1:3], rtol=0, atol=1e-5)


def test_names_are_those_of_hugging_face_and_the_reference_is_frozen(tiny: Path) -> None:
    models = build_models(tiny, dtype="float32", mesh=None, device=torch.device("cpu"))
    actor, critic = (dict(model.named_parameters()) for model in (models.actor, models.critic))
    assert set(actor) - set(critic) == {"lm_head.weight"}
    assert set(critic) - set(actor) == {"score.weight", "score.bias"}
    assert not any(parameter.requires_grad for parameter in models.reference.parameters())
    assert not any(module.training for model in (models.actor, models.critic) for module in model.modules())
    assert not any(isinstance(module, torch.nn.Dropout) and module.p for module in models.critic.modules())


def test_loading_leaves_the_global_generator_alone(tiny: Path) -> None:
    before = torch.get_rng_state()
    load_critic(tiny)
    load_causal_lm(tiny)
    assert torch.equal(before, torch.get_rng_state())


def test_gradients_are_clipped_to_the_joint_norm_by_hand() -> None:
    model = torch.nn.Linear(2, 1)
    model.weight.grad, model.bias.grad = torch.tensor([[2.0, 3.0]]), torch.tensor([6.0])
    assert clip_gradients(model, 3.5) == pytest.approx(7.0)
    torch.testing.assert_close(model.weight.grad, torch.tensor([[1.0, 1.5]]))
    torch.testing.assert_close(model.bias.grad, torch.tensor([3.0]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_is_refused_before_the_optimizer_believes_it(bad: float) -> None:
    model = torch.nn.Linear(2, 1)
    model.weight.grad, model.bias.grad = torch.tensor([[2.0, bad]]), torch.tensor([6.0])
    with pytest.raises(Diverged, match="step 4, critic") as caught:
        require_finite(clip_gradients(model, 3.5), "critic", 3)
    assert caught.value.exit_code is ExitCode.DIVERGED
    assert require_finite(7.0, "actor", 3) == 7.0


@pytest.mark.parametrize("broken", ["nothing", "no weights", "truncated", "pickle", "act", "rope"])
def test_a_model_that_cannot_be_loaded_is_a_data_error(tmp_path: Path, tiny: Path, broken: str) -> None:
    if broken != "nothing":
        (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    if broken == "truncated":
        (tmp_path / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:5000])
    if broken == "pickle":
        torch.save({}, tmp_path / "pytorch_model.bin")
    # transformers answers by a KeyError.
    if (name := {"act": "hidden_act", "rope": "rope_parameters"}.get(broken)) is not None:
        said = json.loads((tiny / "config.json").read_bytes())
        said[name] = {"rope_type": "yarn"} if broken == "rope" else "swishy"
        (tmp_path / "config.json").write_text(json.dumps(said))
        (tmp_path / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes())
    with pytest.raises(DataError) as caught:
        load_causal_lm(tmp_path)
    assert "model.path" in str(caught.value.remedy)


@pytest.mark.long
def test_sharded_over_two_ranks_everything_is_as_in_one_process(tiny: Path) -> None:
    done = torchrun(WORKER, tiny)
    assert done.returncode == 0, done.stderr[-4000:]
