"""A model directory of somebody else's: what `verl-slurm export` takes of it, and how much it spends on it."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.measured import Measured, measured
from tests.hostile.resealed import ROOM_MB, one_line
from tests.lanes import with_variants
from verl_slurm.base.exit_codes import ExitCode

pytestmark = pytest.mark.torch


@pytest.fixture
def model(trained: Any, tmp_path: Path) -> Path:
    """A copy of the base model without its weights, to be made hostile."""
    copy = tmp_path / "model"
    shutil.copytree(trained.base, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    return copy


def change(model: Path, **said: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | said))


@pytest.mark.long
@pytest.mark.scenario("SEC06")
@pytest.mark.parametrize(
    "name", with_variants("chat_template.jinja", "config.json", "tokenizer_config.json", "vocab.txt")
)
def test_a_link_out_of_a_model_directory_is_not_followed(
    checkpoint: Path, model: Path, tmp_path: Path, name: str
) -> None:
    secret = tmp_path / "credentials"
    secret.write_bytes((model / name).read_bytes() if (model / name).exists() else b"secret")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(secret)
    done = measured("export", checkpoint, "--to", "hf", "--out", tmp_path / "out", "--model", model)
    assert done.code == 11 or "is not taken" in done.err
    assert done.code != 0
    assert "Traceback" not in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.scenario("SEC06")
@pytest.mark.variant
def test_a_snapshot_of_hugging_faces_cache_is_taken_through_its_blobs_and_no_others(
    checkpoint: Path, model: Path, tmp_path: Path
) -> None:
    home = tmp_path / "models--x"
    snapshot, blobs = home / "snapshots" / ("1" * 40), home / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        (blobs / f"{number:040x}").write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    out = tmp_path / "out"
    argv = ("export", checkpoint, "--to", "hf", "--model", snapshot, "--out")
    done = measured(*argv, out)
    assert done.code == 0, done.err
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert not (out / "tokenizer.json").is_symlink()
    assert not list(out.glob(".*"))
    # A blob that is itself a link leads elsewhere.
    secret = tmp_path / "secret"
    secret.write_text("secret")
    template = blobs / ("f" * 40)
    template.symlink_to(secret)
    (snapshot / "chat_template.jinja").unlink(missing_ok=True)
    (snapshot / "chat_template.jinja").symlink_to(f"../../blobs/{template.name}")
    done = measured(*argv, tmp_path / "again")
    assert done.code != 0
    assert "chat_template.jinja" in done.err


@pytest.mark.long
@pytest.mark.scenario("SEC06")
def test_a_fifo_and_a_hole_in_a_model_directory_are_refused(
    checkpoint: Path, model: Path, tmp_path: Path
) -> None:
    argv = ("export", checkpoint, "--to", "hf", "--model", model, "--out", tmp_path / "out")
    os.mkfifo(model / "chat_template.jinja")
    done = measured(*argv)
    assert (done.code != 0, "no regular file" in done.err) == (True, True), done.err
    (model / "chat_template.jinja").unlink()
    (model / "vocab.txt").touch()
    os.truncate(model / "vocab.txt", 1 << 30)
    done = measured(*argv)
    assert (done.code != 0, "at most" in done.err) == (True, True), done.err


ROPE = {"rope_theta": 1e4, "rope_type": "default"}
HOSTILE: dict[str, dict[str, Any]] = {
    "layers": {"num_hidden_layers": 10_000_000},
    "layers of 12 digits": {"num_hidden_layers": 10**12},
    "a wide model": {"hidden_size": 10**9},
    "wide heads": {"head_dim": 10**11},
    "wide heads as a float": {"head_dim": 1e11},
    "no heads": {"num_attention_heads": 0},
    "fewer heads than none": {"num_key_value_heads": -1},
    "words": {"vocab_size": 10**12},
    "half a word": {"vocab_size": 264.5},
    "positions": {"max_position_embeddings": 10**15},
    "types of layers": {"layer_types": ["full_attention"] * 400_000},
    "types of layers that are one word": {"layer_types": "x" * 3_000_000},
    "any long list": {"eos_token_id": [1] * 400_000},
    "a rope that is a list": {"rope_parameters": [1] * 1000},
    "a rope of a text": {"rope_parameters": ROPE | {"rope_theta": "x"}},
    "a rope beyond its head": {"rope_parameters": ROPE | {"partial_rotary_factor": 1e12}},
    "a rope of unknown type": {"rope_parameters": ROPE | {"rope_type": "nix"}},
    "a rope of long factors": {
        "rope_parameters": ROPE
        | {"rope_type": "longrope", "factor": 1e300, "original_max_position_embeddings": 10**18}
        | dict.fromkeys(("long_factor", "short_factor"), [1.0] * 100_000)
    },
    "an activation that is code": {"hidden_act": "__import__('os')"},
    "an unknown model": {"model_type": "no such model"},
}

USUAL = ("layers", "half a word", "types of layers", "a rope of long factors", "an activation that is code")


@pytest.fixture(scope="module")
def good(checkpoint: Path, trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """The export with a good model directory."""
    out = tmp_path_factory.mktemp("good") / "out"
    done = measured("export", checkpoint, "--to", "hf", "--model", trained.base, "--out", out)
    assert done.code == 0, done.err
    return done


@pytest.mark.long
@pytest.mark.scenario("SEC09")
# One of each way in which a config may be beyond its checkpoint.
@pytest.mark.parametrize(
    "said",
    [
        *with_variants(*USUAL, keep=2),
        *(pytest.param(name, marks=pytest.mark.soak) for name in HOSTILE if name not in USUAL),
    ],
)
def test_a_config_beyond_its_checkpoint_is_refused_in_little_memory_and_time(
    checkpoint: Path, model: Path, good: Measured, tmp_path: Path, said: str
) -> None:
    change(model, **HOSTILE[said])
    done = measured("export", checkpoint, "--to", "hf", "--model", model, "--out", tmp_path / "out", "--json")
    assert done.peak_mb < good.peak_mb + ROOM_MB
    assert done.seconds < good.seconds + 60
    assert "report it" not in one_line(done)
    assert done.code == ExitCode.DATA, done


@pytest.mark.long
@pytest.mark.scenario("SEC09")
def test_a_config_that_swells_in_memory_is_refused(
    checkpoint: Path, model: Path, good: Measured, tmp_path: Path
) -> None:
    text = (model / "config.json").read_text().rstrip().removesuffix("}")
    (model / "config.json").write_text(text + ',"a":[' + "[]," * 1_200_000 + "1]}")
    done = measured("export", checkpoint, "--to", "hf", "--model", model, "--out", tmp_path / "out")
    assert done.peak_mb < good.peak_mb + ROOM_MB
    assert (done.code != 0, "JSON values" in done.err) == (True, True)


@pytest.mark.scenario("SEC09")
def test_a_library_that_takes_too_much_cpu_ends_the_export_in_one_line(
    checkpoint: Path, model: Path, tmp_path: Path
) -> None:
    # The import of torch alone takes more than a second: the limit is what ends it, as it would a loop in C.
    argv = (
        sys.executable,
        "-P",
        "-m",
        "verl_slurm.cli",
        "export",
        checkpoint,
        "--to",
        "hf",
        "--model",
        model,
    )
    script = "ulimit -S -t 1; exec " + shlex.join(map(str, (*argv, "--out", tmp_path / "out", "--json")))
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == ExitCode.DATA, done.stderr
    assert done.stderr.count("\n") == 1
    assert "busy without end" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.scenario("SEC10")
@pytest.mark.parametrize(
    "key",
    [
        "attn_implementation",
        pytest.param("_attn_implementation", marks=pytest.mark.variant),
        pytest.param("experts_implementation", marks=pytest.mark.variant),
    ],
)
def test_a_config_that_names_a_kernel_of_the_hub_is_exported_without_it(
    checkpoint: Path, model: Path, tmp_path: Path, key: str
) -> None:
    change(model, **{key: "eve/kernel"})
    done = measured("export", checkpoint, "--to", "hf", "--model", model, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert "eve/kernel" not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.long
@pytest.mark.scenario("SEC13")
@pytest.mark.variant
def test_export_and_compare_make_no_compile_cache_under_a_name_that_anybody_can_have_made(
    checkpoint: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch, once imported here, sets it
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environ = {"TMPDIR": str(temporary), "USER": "ada", "LOGNAME": "ada"}
    done = measured(
        *("export", checkpoint, "--to", "hf", "--model", model, "--out", tmp_path / "out"), environ=environ
    )
    assert done.code == 0, done.err
    assert measured("inspect", "--bits", checkpoint, checkpoint, environ=environ).code == 0
    assert list(temporary.iterdir()) == []
