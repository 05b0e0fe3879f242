"""What a run would start or load is looked at before it is queued, without running it; what cannot be seen is said."""

import subprocess
from pathlib import Path

import msgspec
import pytest

from tests.builders import run_config
from verl_slurm.base.errors import ConfigError, DataError, NotFound, VerlSlurmError
from verl_slurm.checks import good, told
from verl_slurm.config.schema import CodeConfig, ContainerConfig, RunConfig
from verl_slurm.submit.checks.model_and_reward import check_guest, check_reward


def started_by(*command: str, backend: str = "command", **keys: object) -> RunConfig:
    config = run_config(**keys)
    return msgspec.structs.replace(
        config, trainer=msgspec.structs.replace(config.trainer, backend=backend, command=command)
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text("python train.py\n")
    (tmp_path / "job").write_text("#!/bin/bash\nexec python train.py\n")
    (tmp_path / "tool").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "train.py").write_text("import json\nimport helper\n")
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "train").write_text("import json\n")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "why", "remedy"),
    [
        ("accelerate launch --config_file a.yaml train.py --lr 3", "a launcher", '[train.py, --lr, "3"]'),
        ("/opt/bin/torchrun --nproc_per_node 8 -m my.mod x", "a launcher", "[-m, my.mod, x]"),
        ("deepspeed --hostfile h train.py", "a launcher", "[train.py]"),
        ("python train.py", "a launcher", "[train.py]"),
        ("python3.11 -u -m my.mod", "a launcher", "[-m, my.mod]"),
        ("python -m torch.distributed.run --nnodes 2 train.py", "a launcher", "[train.py]"),
        ("-m accelerate.commands.launch --num_processes 2 train.py", "a launcher", "[train.py]"),
        ("uv run --with trl torchrun train.py", "a launcher", "[train.py]"),
        ("srun -m cyclic python train.py", "a launcher", "[train.py]"),
        ("env X=1 python -m mod", "a launcher", 'env: {X: "1"}, and trainer.command: [-m, mod]'),
        (
            "X=1 Y=a=b train.py Z=2",
            "no Python file X=1",
            'env: {X: "1", Y: "a=b"}, and trainer.command: [train.py,',
        ),
        (
            "X=1 env Y= ./run.sh Z=2",
            "no Python file X=1",
            'env: {X: "1", Y: ""}, and set trainer.command to the',
        ),
        ("mpirun -x X=1 python train.py", "a launcher", 'env: {X: "1"}, and trainer.command: [train.py]'),
        ("X=1", "no Python file X=1", 'env: {X: "1"}, and set trainer.command to your own program'),
        ("bash -c 'x'", "a launcher", "the Python program that the script starts"),
        ("bash run.sh", "a launcher", "the Python program that the script starts"),
        ("run.sh", "a shell script", "slurm.setup"),
        ("gone.sh", "a shell script", "slurm.setup"),
        ("job", "a script for /bin/bash", "your own program"),
        ("tool --x", "a file that is no Python source", "your own program"),
        ("trl sft --config x.yaml", "a launcher", "your own program"),
        ("my-train --lr 3", "no Python file my-train", "your own program"),
        ("-u train.py", "an option of Python's", "[train.py]"),
        (". x", "a directory", "your own program"),
        ("-m", "-m without a module", "your own program"),
    ],
)
def test_a_launcher_a_script_or_a_binary_is_refused_with_what_to_write(
    here: Path, command: str, why: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_guest(started_by(*command.split(" ")))
    line = caught.value.one_line()
    assert f": {why}, expected a Python file, or -m and a module" in line
    assert remedy in line.partition("); ")[2]


def test_a_program_is_good_unless_it_is_not_there_cannot_be_parsed_or_lacks_a_module(here: Path) -> None:
    for command in ("train.py", "train", "-m json.tool"):
        assert check_guest(started_by(*command.split())) == [good("program")]
    with pytest.raises(NotFound, match="no such program: .*set trainer.command$"):
        check_guest(started_by("gone.py"))
    (here / "cut.py").write_text("def f(:\n")
    with pytest.raises(DataError, match=r"cut\.py"):
        check_guest(started_by("cut.py"))
    (here / "needs.py").write_text(
        "import vs_not_there.x\ntry:\n    import vs_perhaps\nexcept ImportError: pass\n"
    )
    with pytest.raises(ConfigError, match=r"lacks a module: \S*needs\.py \(found no vs_not_there,"):
        check_guest(started_by("needs.py"))
    with pytest.raises(ConfigError, match="found no vs_not_there,"):
        check_guest(started_by("-m", "vs_not_there.main"))
    with pytest.raises(ConfigError, match="entry: sft"):
        check_guest(started_by("-m", "verl.trainer.sft_trainer"))


def test_what_cannot_be_seen_from_here_is_said_and_not_called_good(here: Path) -> None:
    (here / "needs.py").write_text("import vs_not_there\n")
    (here / "moves.py").write_text("import sys\nsys.path.append('lib')\nimport vs_not_there\n")
    in_image = {"container": ContainerConfig(image="docker://x")}
    cases: list[tuple[list[str], dict[str, object], str]] = [
        (["needs.py"], {"setup": ("module load x",)}, "slurm.setup may bring them"),
        (["needs.py"], {"modules": ("x",)}, "slurm.modules may bring them"),
        (["needs.py"], {"env": {"PYTHONPATH": "/vs/gone"}}, "/vs/gone, which is not on this machine"),
        (["moves.py"], {}, "it changes sys.path"),
        (["-m", "vs_not_there"], in_image, "the container's"),
        (["-u", "needs.py"], {"backend": "ray"}, "which begins with -u"),
    ]
    for words, keys, said in cases:
        backend = str(keys.pop("backend", "command"))
        _, (note,) = told(check_guest(started_by(*words, backend=backend, **keys)))
        assert note.startswith("not looked at: "), note
        assert said in note


def test_no_code_of_the_configurations_pythonpath_is_run(here: Path) -> None:
    (here / "lib").mkdir()
    (here / "lib" / "sitecustomize.py").write_text(f"open({str(here / 'ran')!r}, 'w')\n")
    (here / "lib" / "only_here.py").write_text(f"open({str(here / 'ran')!r}, 'w')\n")
    (here / "needs.py").write_text("import only_here\n")
    found = check_guest(started_by("needs.py", env={"PYTHONPATH": str(here / "lib")}))
    assert told(found)[1] == []
    assert not (here / "ran").exists()


SCORE = "def score(prompts, responses, answers):\n    return [0.0 for _ in prompts]\n"


@pytest.mark.parametrize(
    ("imported", "by_file", "by_module"),
    [
        ("from .judge import f", "no dots: the file is loaded by itself", ""),
        ("from . import judge, known", "no dots", ""),
        ("from .gone import f", "no dots", "found no gone in"),
        ("from .judge.gone import f", "no dots", "found no judge.gone in"),
        ("from . import gone", "no dots", "found no gone in"),
        ("from ..judge import f", "no dots", "at most 1 dot: it is loaded as part of mine"),
    ],
)
def test_a_relative_import_works_or_is_refused(
    here: Path, imported: str, by_file: str, by_module: str
) -> None:
    (here / "mine").mkdir()
    for name, text in {
        "__init__": "known = 1\n",
        "judge": "f = 1\n",
        "reward": f"{imported}\n{SCORE}",
    }.items():
        (here / "mine" / f"{name}.py").write_text(text)
    config = run_config(env={"PYTHONPATH": str(here)})
    with pytest.raises(ConfigError, match=by_file) as caught:
        check_reward(f"python:{here}/mine/reward.py:score", config)
    assert "python:PACKAGE.MODULE:FUNCTION" in str(caught.value.remedy)
    with pytest.raises(ConfigError, match="modules beside the program are found"):
        check_guest(started_by("mine/reward.py"))
    module = "python:mine.reward:score"
    program = started_by("-m", "mine.reward", env={"PYTHONPATH": str(here)})
    if not by_module:
        assert check_reward(module, config) == []
        assert told(check_guest(program))[0] == ["program"]
    else:
        for check in (lambda: check_reward(module, config), lambda: check_guest(program)):
            with pytest.raises(ConfigError, match=by_module):
                check()


@pytest.mark.parametrize("inside", [False, True], ids=["at the top", "in the function"])
def test_a_reward_that_imports_a_missing_package_is_refused(
    here: Path, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, blank = "import vs_not_there, json", "    " if inside else ""
    body = f"{'' if inside else line}\ndef score(prompts, responses, answers):\n    {line if inside else 'pass'}\n"
    (here / "reward.py").write_text(body + blank + "pass\n")
    reward = f"python:{here}/reward.py:score"
    with pytest.raises(ConfigError, match=r"reward\.py \(found no vs_not_there,"):
        check_reward(reward, run_config())
    assert "slurm.setup" in check_reward(reward, run_config(setup=("x",)))[0]
    (here / "reward.py").write_text("from helper import x\ndef score(prompt, response, answer): return x\n")
    # In the job the copy takes the place of this folder in PYTHONPATH, from here or of the configuration.
    monkeypatch.setenv("PYTHONPATH", f"{here}:/tmp")
    in_config = msgspec.structs.replace(run_config(), env={"PYTHONPATH": str(here)})
    for config in (run_config(), in_config):
        with pytest.raises(ConfigError, match=r"set code\.tree=\S+: helper lies beside reward\.py"):
            check_reward(reward, config)
    assert check_reward(reward, msgspec.structs.replace(run_config(), code=CodeConfig(tree=str(here)))) == []
    subprocess.run(["git", "init", "-q", str(here)], check=True)
    assert check_reward(reward, run_config()) == [], "of a work tree all is copied"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "a Qwen2ForCausalLM"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "2 labels"),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, "3 labels"),
        ({"id2label": {"0": "x"}}, "weights without a head"),
    ],
)
def test_a_classifier_without_one_score_is_refused(tmp_path: Path, said: dict[str, object], why: str) -> None:
    def weights(name: bytes) -> None:
        header = b'{"%b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}' % name
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))

    weights(b"score.weight")
    (tmp_path / "tokenizer.json").write_text("{}")
    one = {"model_type": "qwen2", "architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "x"}}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(one))
    assert check_reward(f"classifier:{tmp_path}") == []
    weights(b"v_head.weight")
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({"model_type": "qwen2"} | said))
    with pytest.raises(VerlSlurmError, match=why):
        check_reward(f"classifier:{tmp_path}")


def test_a_source_of_deep_attributes_is_read_in_a_moment(here: Path) -> None:
    deep = "x = (" + "+".join(["a"] * 900) + ").y\n"
    (here / "deep.py").write_text(deep + f"x = ([{'0,' * 900}]){'.a' * 150}\n" * 100)
    assert told(check_guest(started_by("deep.py")))[0] == ["program"]
