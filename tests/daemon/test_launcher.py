"""The command lines of a generation."""

from pathlib import Path

import pytest
from verl_slurm_daemon.allocation.launcher import agent_argv, launcher_argv, launcher_env, step_argv

from verl_slurm.base.paths import RunPaths
from verl_slurm.config.load import parse_config
from verl_slurm.config.schema import RunConfig
from verl_slurm.wire.messages import Launch

PATHS = RunPaths("/shared/me/run")
LAUNCH = Launch(
    generation=2, epoch=7, node_rank=1, master_addr="10.0.0.1", master_port=29500, resume="step_000004"
)
LIFE = ["--run", "/shared/me/run", "--epoch", "7", "--resume", "step_000004"]


def test_the_launcher_of_ranks_is_told_its_place_and_the_program() -> None:
    argv = launcher_argv("python", RunConfig(), PATHS, LAUNCH, Path("/run/x"))
    assert argv[:7] == ["python", "-P", "-m", "verl_slurm_daemon.agent.ranks", "2", "1", "1"]
    assert argv[7:] == ["-m", "verl_slurm.trainer", *LIFE]


def test_a_step_has_one_agent_a_node_and_no_opinion_about_their_ends() -> None:
    argv = step_argv("srun", RunConfig(), agent_argv("python", PATHS, 7))
    assert "--ntasks=2" in argv
    assert "--kill-on-bad-exit=0" in argv
    assert argv[-9:] == agent_argv("python", PATHS, 7)


@pytest.mark.scenario("M08")
def test_no_secret_is_on_a_command_line_or_in_the_environment() -> None:
    env = launcher_env({"PATH": "/bin"}, RunConfig(), PATHS, LAUNCH, Path("/run/x"))
    assert set(env) == {
        "PATH",
        "VERL_SLURM_CONTROL",
        "TOKENIZERS_PARALLELISM",
        "PYTHONUNBUFFERED",
        "PYTHONSAFEPATH",
        "TORCHINDUCTOR_CACHE_DIR",
        "VLLM_RPC_BASE_PATH",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
    }


@pytest.mark.scenario("M06")
def test_compiled_code_is_loaded_from_no_place_that_others_can_make() -> None:
    """By default torch loads it from /tmp/torchinductor_USER. What the user himself has set stays."""
    private = Path("/run/verl-slurm-1-x")
    assert launcher_env({}, RunConfig(), PATHS, LAUNCH, private)["TORCHINDUCTOR_CACHE_DIR"].startswith(
        f"{private}/"
    )
    mine = {"TORCHINDUCTOR_CACHE_DIR": "/home/me/compiled"}
    assert (
        launcher_env(mine, RunConfig(), PATHS, LAUNCH, private)["TORCHINDUCTOR_CACHE_DIR"]
        == "/home/me/compiled"
    )


def test_a_heterogeneous_step_takes_its_counts_from_the_components() -> None:
    argv = step_argv("srun", RunConfig(), agent_argv("python", PATHS, 7), het_size=3)
    assert "--het-group=0,1,2" in argv
    assert not [word for word in argv if word.startswith(("--nodes", "--ntasks="))]


def contained(runtime: str, *more: str) -> list[str]:
    container = f"slurm.container={{runtime: {runtime}, image: img, python: py, binds: [/opt]}}"
    config = parse_config(b"", "my.yaml", ("run_dir=/shared/run", "model.path=/models/m", container, *more))
    return step_argv("srun", config, agent_argv("/venv/bin/python", PATHS, 7))


def test_apptainer_runs_the_images_own_python_and_sees_what_the_run_needs() -> None:
    argv = contained("apptainer", "checkpoint.local_dir=/nvme")
    at = argv.index("apptainer")
    assert argv[at + 1 : at + 5] == [
        "exec",
        "--bind=/models/m:/models/m,/nvme:/nvme,/opt:/opt,/shared/run:/shared/run",
        "img",
        "py",
    ]
    assert argv[at + 5 :] == agent_argv("python", PATHS, 7)[1:]
    cuda = contained("apptainer", "distributed.device=cuda", "slurm.gpus_per_node=1")
    assert "--nv" in cuda


def test_pyxis_is_told_by_options_of_srun() -> None:
    argv = contained("pyxis")
    assert "--container-image=img" in argv
    assert "--container-mounts=/models/m:/models/m,/opt:/opt,/shared/run:/shared/run" in argv
    assert argv[argv.index("py") :] == ["py", *agent_argv("python", PATHS, 7)[1:]]


def _guest(text: str) -> RunConfig:
    return parse_config(f"trainer: {{{text}}}".encode(), "x.yaml")


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("backend: command, command: [/x/train.py, --run, '3']", ["/x/train.py", "--run", "3"]),
        ("backend: command, command: [-m, pkg.train, --nnodes, '9']", ["-m", "pkg.train", "--nnodes", "9"]),
        ("backend: verl, entry: sft", ["-m", "verl_slurm.loops.verl_sft", *LIFE]),
    ],
)
def test_a_guest_is_started_with_its_own_words(text: str, program: list[str]) -> None:
    argv = launcher_argv("python", _guest(text), PATHS, LAUNCH, Path("/run/x"))
    assert argv[7:] == program


def test_ray_is_told_where_its_head_is_and_which_node_this_is() -> None:
    argv = launcher_argv("python", _guest("backend: verl"), PATHS, LAUNCH, Path("/run/x"))
    assert argv[:4] == ["python", "-P", "-m", "verl_slurm.loops.verl_node"]
    assert argv[-6:] == ["--node-rank", "1", "--head", "10.0.0.1:29500", "--scratch", "/run/x"]


def test_a_guest_learns_from_its_environment_whose_life_it_leads() -> None:
    config = _guest("backend: command, command: [/x/train.py]")
    env = launcher_env({"PYTHONPATH": "/mine"}, config, PATHS, LAUNCH, Path("/run/x"))
    assert {key: value for key, value in env.items() if key.startswith("VERL_SLURM_")} == {
        "VERL_SLURM_CONTROL": "/run/x",
        "VERL_SLURM_RUN": "/shared/me/run",
        "VERL_SLURM_EPOCH": "7",
        "VERL_SLURM_GENERATION": "2",
        "VERL_SLURM_RESUME": "step_000004",
    }
    assert env["PYTHONPATH"] == "/mine:/x"
