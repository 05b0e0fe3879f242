"""The command lines of a restart."""

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from verl_slurm_daemon.agent.rank_container import environ_of_image, gpus_here, ranks_environ
from verl_slurm_daemon.allocation import launcher

import verl_slurm
from tests.builders import run_config
from tests.processes import python_path
from verl_slurm.base.errors import ConfigError
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.load import parse_config
from verl_slurm.config.schema import DistributedConfig, HealthConfig, RunConfig, ServiceConfig
from verl_slurm.containers.inside import ENVIRONMENT
from verl_slurm.containers.runtimes import Gpus, contained_ranks_argv, in_image, mounts
from verl_slurm.wire.messages import Launch

PATHS = RunPaths("/shared/me/run")
LAUNCH = Launch(
    restart=2, attempt=7, node_rank=1, master_addr="10.0.0.1", master_port=29500, resume="step_000004"
)
LIFE = ["--run", "/shared/me/run", "--attempt", "7", "--resume", "step_000004"]


@pytest.mark.parametrize("backend", ["native", "verl", "command", "ray"])
def test_all_attempts_of_a_run_continue_one_run_of_its_trackers(backend: str) -> None:
    config = msgspec.convert({"name": "mine", "trainer": {"backend": backend}}, RunConfig)
    first, later = (
        launcher.launcher_env(
            {}, config, PATHS, msgspec.structs.replace(LAUNCH, attempt=attempt), Path(f"/run/{attempt}")
        )
        for attempt in (1, 2)
    )
    names = ("WANDB_RUN_ID", "SWANLAB_RUN_ID", "TENSORBOARD_DIR")
    assert [first[name] for name in names] == [later[name] for name in names]
    assert (first["WANDB_RESUME"], first["SWANLAB_RESUME"]) == ("allow", "allow"), (
        "the first attempt finds none"
    )
    assert re.fullmatch(r"[a-z0-9]{21}", first["SWANLAB_RUN_ID"])
    another = launcher.launcher_env({}, config, RunPaths("/another"), LAUNCH, Path("/run/1"))
    assert not {another[name] for name in names} & {first[name] for name in names}
    mine = launcher.launcher_env({"WANDB_RUN_ID": "mine"}, config, PATHS, LAUNCH, Path("/run/1"))
    assert mine["WANDB_RUN_ID"] == "mine"


def test_the_launcher_of_ranks_is_told_its_place_and_so_is_ray() -> None:
    argv = launcher.launcher_argv("python", RunConfig(), PATHS, LAUNCH, Path("/run/x"))
    assert argv[:7] == ["python", "-P", "-m", "verl_slurm_daemon.agent.ranks", "2", "1", "1"]
    assert argv[7:] == ["-m", "verl_slurm.trainer", *LIFE]
    argv = launcher.launcher_argv("python", _guest("backend: verl"), PATHS, LAUNCH, Path("/run/x"))
    assert argv[:4] == ["python", "-P", "-m", "verl_slurm.loops.verl.ray_node"]
    place = ["--node-rank", "1", "--head", "10.0.0.1:29500", "--nodes", "2", "--scratch", "/run/x"]
    assert argv[-8:] == place


def test_a_step_has_one_agent_a_node_and_a_heterogeneous_one_its_components_counts() -> None:
    argv = launcher.step_argv("srun", RunConfig(), launcher.daemon_argv("python", "agent", PATHS, 7))
    assert "--ntasks=2" in argv
    assert "--kill-on-bad-exit=0" in argv
    assert argv[-9:] == launcher.daemon_argv("python", "agent", PATHS, 7)
    argv = launcher.step_argv(
        "srun", RunConfig(), launcher.daemon_argv("python", "agent", PATHS, 7), het_size=3
    )
    assert "--het-group=0,1,2" in argv
    assert not [word for word in argv if word.startswith(("--nodes", "--ntasks="))]


@pytest.mark.scenario("M08")
def test_no_secret_is_on_a_command_line_or_in_the_environment() -> None:
    env = launcher.launcher_env({"PATH": "/bin"}, RunConfig(), PATHS, LAUNCH, Path("/run/x"))
    assert set(env) == {
        "PATH",
        "VERL_SLURM_CONTROL",
        "TOKENIZERS_PARALLELISM",
        "PYTHONHASHSEED",
        "PYTHONUNBUFFERED",
        "PYTHONSAFEPATH",
        "TORCHINDUCTOR_CACHE_DIR",
        "VLLM_RPC_BASE_PATH",
        "TENSORBOARD_DIR",
        "WANDB_RUN_ID",
        "WANDB_RESUME",
        "SWANLAB_RUN_ID",
        "SWANLAB_RESUME",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "TORCH_FR_BUFFER_SIZE",
        "TORCH_FR_DUMP_TEMP_FILE",
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
    }


@pytest.mark.scenario("M06")
def test_hash_seed_flight_records_and_place_of_compiled_code_are_ours_unless_the_user_says_otherwise() -> (
    None
):
    for said, seed in (({}, "0"), ({"PYTHONHASHSEED": "random"}, "random")):
        env = launcher.launcher_env(dict(said), RunConfig(), PATHS, LAUNCH, Path("/run/x"))
        assert env["PYTHONHASHSEED"] == seed
    env = launcher.launcher_env({"TORCH_FR_BUFFER_SIZE": "7"}, RunConfig(), PATHS, LAUNCH, Path("/run/x"))
    assert env["TORCH_FR_BUFFER_SIZE"] == "7"
    assert env["TORCH_FR_DUMP_TEMP_FILE"] == f"{PATHS.logs}/attempt_000007.restart_02.flight.rank_"
    none = msgspec.structs.replace(RunConfig(), health=HealthConfig(flight_records=0))
    assert not [
        name
        for name in launcher.launcher_env({}, none, PATHS, LAUNCH, Path("/run/x"))
        if "TORCH_" in name[:6]
    ]
    """By default torch loads it from /tmp/torchinductor_USER. What the user himself has set stays."""
    private = Path("/run/verl-slurm-1-x")
    assert launcher.launcher_env({}, RunConfig(), PATHS, LAUNCH, private)[
        "TORCHINDUCTOR_CACHE_DIR"
    ].startswith(f"{private}/")
    mine = {"TORCHINDUCTOR_CACHE_DIR": "/home/me/compiled"}
    assert (
        launcher.launcher_env(mine, RunConfig(), PATHS, LAUNCH, private)["TORCHINDUCTOR_CACHE_DIR"]
        == "/home/me/compiled"
    )


IMAGE = "/images/i.sqsh"
INSIDE = ["verl_slurm.containers.inside", "/run/x", "/tmp", "py", "-P", "-m", "verl_slurm_daemon.agent.ranks"]


def contained(runtime: str, *more: str, gpus: Gpus = "", image: str = IMAGE) -> list[str]:
    """The command up to the look into the image; what comes after it is checked here."""
    container = f"slurm.container={{runtime: {runtime}, image: {image}, python: py, binds: [/opt]}}"
    words = ("run_dir=/shared/run", "model.path=/models/m", container, "checkpoint.local_dir=/nvme", *more)
    config = parse_config(b"", "my.yaml", words)
    argv = contained_ranks_argv(
        config, gpus, "/run/x", launcher.launcher_argv("py", config, PATHS, LAUNCH, Path("/run/x"))
    )
    at = argv.index("py")
    assert argv[at : at + 3] == ["py", "-P", "-c"]
    assert argv[at + 4 : at + 6] == [image, verl_slurm.__version__]
    assert argv[at + 7 :][: len(INSIDE)] == INSIDE
    return argv[:at]


@pytest.mark.parametrize(
    ("runtime", "image", "begins", "mount", "ends"),
    [
        ("apptainer", IMAGE, ["apptainer", "exec", "--cleanenv", "--no-home"], "--bind={0}:{0}:{1}", [IMAGE]),
        (
            "podman",
            "i@sha256:" + "0" * 64,
            ["podman", "run", "--rm", "--cgroups=disabled", "--network=host", "--ipc=host", "--read-only"],
            "--volume={0}:{0}:{1}",
            ["i@sha256:" + "0" * 64],
        ),
    ],
)
def test_a_runtime_mounts_what_the_run_writes_and_its_inputs_read_only(
    runtime: str, image: str, begins: list[str], mount: str, ends: list[str]
) -> None:
    argv = contained(runtime, "slurm.container.extra_args=[--shm-size=8g]", image=image)
    assert argv[: len(begins)] == begins
    assert argv[-2:] == ["--shm-size=8g", *ends]
    for place in ("/run/x", "/shared/run", "/nvme", "/opt"):
        assert mount.format(place, "rw") in argv
    assert mount.format("/models/m", "ro") in argv


@pytest.mark.parametrize(
    ("runtime", "gpus", "words"),
    [
        ("apptainer", "nvidia", ["--nv"]),
        ("apptainer", "amd", ["--rocm"]),
        ("podman", "nvidia", ["--device=nvidia.com/gpu=all"]),
        ("podman", "amd", ["--device=/dev/kfd", "--device=/dev/dri"]),
    ],
)
def test_an_image_gets_the_gpus_of_the_node_that_it_runs_on(
    runtime: str, gpus: Gpus, words: list[str]
) -> None:
    """NOT RUN with a GPU: the words alone are checked."""
    image = "i@sha256:" + "0" * 64 if runtime == "podman" else IMAGE
    without, with_gpus = contained(runtime, image=image), contained(runtime, gpus=gpus, image=image)
    assert set(words) <= set(with_gpus)
    assert not set(words) & set(without)


@pytest.mark.parametrize(
    ("device", "drivers", "found"),
    [
        ("auto", ["nvidia"], "nvidia"),
        ("auto", ["amd"], "amd"),
        ("auto", [], ""),
        ("cuda", ["nvidia", "amd"], "nvidia"),
        ("cpu", ["nvidia", "amd"], ""),
    ],
)
def test_the_node_decides_whether_an_image_gets_gpus(
    device: str, drivers: list[str], found: str, tmp_path: Path
) -> None:
    for name in drivers:
        (tmp_path / name).touch()
    config = parse_config(b"", "x.yaml", (f"distributed.device={device}", "slurm.gpus_per_node=1"))
    assert gpus_here(config, tmp_path / "nvidia", tmp_path / "amd") == found


def test_pyxis_is_told_by_options_of_srun() -> None:
    container = f"slurm.container={{runtime: pyxis, image: {IMAGE}, python: py, binds: [/opt]}}"
    words = ("run_dir=/shared/run", "model.path=/models/m", "slurm.gpus_per_node=1", container)
    config = parse_config(b"", "my.yaml", words)
    argv = launcher.step_argv("srun", config, launcher.daemon_argv("/venv/bin/python", "agent", PATHS, 7))
    assert f"--container-image={IMAGE}" in argv
    assert "--container-mounts=/models/m:/models/m:ro,/opt:/opt:rw,/shared/run:/shared/run:rw" in argv
    assert "--container-workdir=/tmp" in argv
    assert argv[-6:] == launcher.daemon_argv("python", "agent", PATHS, 7)[3:]
    # Enroot's hook mounts the driver if it is asked to; the device is `auto`.
    assert in_image(config)["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert in_image(parse_config(b"", "my.yaml", words[:2])) == {}


def test_all_inputs_are_mounted_whatever_trains() -> None:
    container = "slurm.container={image: /i.sif}"

    def places(*words: str) -> dict[str, bool]:
        config = parse_config(b"", "my.yaml", ("run_dir=/run", container, *words))
        return dict(mounts(config))

    reward = ("model.reward=python:/code/score.py:score", "data.root=/data", "model.path=/m")
    sealed = ("checkpoint.encryption={key_file: /keys/run.key}", "checkpoint.resume_from=/other/step_000002")
    assert places(*reward, *sealed) == {
        "/code": False,
        "/data": False,
        "/keys/run.key": False,
        "/m": False,
        "/other/step_000002": False,
        "/run": True,
    }
    files = (
        "trainer.backend=verl",
        "verl.data.train_files=[/d/a.parquet, /d/b.parquet]",
        "verl.data.val_files=/d/v",
    )
    models = ("verl.actor_rollout_ref.model.path=/m/actor", "verl.critic.model.path=/m/critic")
    assert set(places(*files, *models)) == {
        *("/run", "/d/a.parquet", "/d/b.parquet", "/d/v", "/m/actor", "/m/critic"),
    }
    program = ("trainer={backend: command, command: [/code/train.py]}", "data.root=/data")
    assert places(*program) == {"/run": True, "/code": False, "/data": False}
    # An agent outside reads a secret itself, and the image does not see the file.
    secret = "env_from_files={DEMO_TOKEN: /secret}"
    assert "/secret" not in places(secret)
    assert places(secret, "slurm.container.runtime=pyxis")["/secret"] is False


def test_an_image_keeps_its_own_paths_and_gets_the_runs_variables() -> None:
    config = parse_config(b"env: {PATH: /mine}\nslurm: {container: {image: /i.sif}}", "x.yaml")
    node = {
        "PATH": "/mine",
        "LD_LIBRARY_PATH": "/node",
        "HOME": "/home/me",
        "SLURM_JOB_ID": "7",
        "NCCL_DEBUG": "WARN",
    }
    assert environ_of_image(node, config) == {"PATH": "/mine", "SLURM_JOB_ID": "7", "NCCL_DEBUG": "WARN"}


def test_a_node_without_the_runtime_says_so_and_a_secret_is_kept_from_it(tmp_path: Path) -> None:
    text = b"env_from_files: {TOKEN: /t}\nslurm: {container: {image: /i.sif}}"
    config = parse_config(text, "x.yaml")
    node = {"PATH": str(tmp_path), "TOKEN": "sesame"}
    with pytest.raises(ConfigError) as caught:
        ranks_environ(config, PATHS, LAUNCH, tmp_path, node)
    assert caught.value.one_line() == (
        "the container's runtime is not on this node: slurm.container.runtime (found no apptainer in PATH); "
        "install it, or load it: slurm.modules: [apptainer]"
    )
    (tmp_path / "apptainer").touch(mode=0o755)
    assert ranks_environ(config, PATHS, LAUNCH, tmp_path, node) == {"PATH": str(tmp_path)}
    handed_over = tmp_path / ENVIRONMENT
    assert b"TOKEN=sesame\0" in handed_over.read_bytes()
    assert handed_over.stat().st_mode & 0o777 == 0o600


def _guest(text: str) -> RunConfig:
    return parse_config(f"trainer: {{{text}}}".encode(), "x.yaml")


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("backend: command, command: [/x/train.py, --run, '3']", ["/x/train.py", "--run", "3"]),
        ("backend: command, command: [-m, pkg.train, --nnodes, '9']", ["-m", "pkg.train", "--nnodes", "9"]),
        ("backend: verl, entry: sft", ["-m", "verl_slurm.loops.verl.verl_sft", *LIFE]),
    ],
)
def test_a_guest_is_started_with_its_own_words(text: str, program: list[str]) -> None:
    argv = launcher.launcher_argv("python", _guest(text), PATHS, LAUNCH, Path("/run/x"))
    assert argv[7:] == program


def test_a_guest_learns_from_its_environment_whose_life_it_leads() -> None:
    config = _guest("backend: command, command: [/x/train.py]")
    env = launcher.launcher_env({"PYTHONPATH": "/mine"}, config, PATHS, LAUNCH, Path("/run/x"))
    assert {key: value for key, value in env.items() if key.startswith("VERL_SLURM_")} == {
        "VERL_SLURM_CONTROL": "/run/x",
        "VERL_SLURM_RUN": "/shared/me/run",
        "VERL_SLURM_ATTEMPT": "7",
        "VERL_SLURM_RESTART": "2",
        "VERL_SLURM_RESUME": "step_000004",
    }
    assert env["PYTHONPATH"] == "/mine", "the launcher itself imports nothing that lies beside the program"


def test_modules_beside_the_program_are_the_programs_alone_and_come_first(tmp_path: Path) -> None:
    """A `utils.py` at the root of the repository was imported in the place of the one beside the program."""
    (own := tmp_path / "scripts").mkdir()
    for folder in (tmp_path, own):
        (folder / "utils.py").write_text("")
    for name in ("json", "psutil", "msgspec", "verl_slurm", "verl_slurm_daemon"):
        (own / f"{name}.py").write_text(f"import os\nos.write(1, b'{name} of the program\\n')")
    (own / "near.py").write_text("")
    (own / "program.py").write_text(
        "import os, subprocess, sys, utils\n"
        "os.write(1, f'{sys.path[0]}\\n{utils.__file__}\\n'.encode())\n"
        "import json\n"
        "child = [sys.executable, '-c', 'import near; print(near.__file__)']\n"
        "os.write(1, subprocess.check_output(child))"
    )
    config = _guest(f"backend: command, command: [{own}/program.py]")
    config = msgspec.structs.replace(config, distributed=DistributedConfig(nodes=1, dp_size=1))
    launch = msgspec.structs.replace(LAUNCH, node_rank=0)
    argv = launcher.launcher_argv(sys.executable, config, PATHS, launch, tmp_path)
    environ = {**os.environ, **python_path(tmp_path)}
    environ = launcher.launcher_env(environ, config, PATHS, launch, tmp_path)
    done = subprocess.run(argv, capture_output=True, text=True, env=environ, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str(own),
        f"{own}/utils.py",
        "json of the program",
        f"{own}/near.py",
    ], "a child finds its neighbours, too"


JUDGE = ServiceConfig(command=("judge.py",), nodes=2)
APART = ServiceConfig(command=("sandbox.py",), nodes=1, slurm={"partition": "cpu"})
BESIDE = ServiceConfig(command=("beside.py",))


@pytest.mark.parametrize(
    ("services", "sizes", "service", "nodes"),
    [
        ({}, (2,), "", launcher.StepNodes(range(2), (0,), True)),
        ({}, (1, 1), "", launcher.StepNodes(range(2), (0, 1), True)),
        ({"judge": JUDGE}, (4,), "", launcher.StepNodes(range(2), (0,), False)),
        ({"judge": JUDGE}, (4,), "judge", launcher.StepNodes(range(2, 4), (0,), False)),
        ({"beside": BESIDE}, (2,), "", launcher.StepNodes(range(2), (0,), True)),
        ({"beside": BESIDE}, (2,), "beside", launcher.StepNodes(range(1), (0,), False)),
        ({"apart": APART, "judge": JUDGE}, (4, 1), "judge", launcher.StepNodes(range(2, 4), (0,), False)),
        ({"apart": APART, "judge": JUDGE}, (4, 1), "apart", launcher.StepNodes(range(4, 5), (1,), True)),
        # By hand, in a component of their own though the configuration does not say so.
        ({"judge": JUDGE}, (2, 2), "", launcher.StepNodes(range(2), (0,), True)),
        ({"judge": JUDGE}, (2, 2), "judge", launcher.StepNodes(range(2, 4), (1,), True)),
    ],
)
def test_the_step_of_each_service_has_its_nodes_and_that_of_the_ranks_the_rest(
    services: dict[str, ServiceConfig], sizes: tuple[int, ...], service: str, nodes: launcher.StepNodes
) -> None:
    assert launcher.nodes_of_step(run_config(nodes=2, services=services), sizes, service) == nodes


def test_a_step_on_a_part_of_a_component_names_its_nodes() -> None:
    config, host = (
        run_config(nodes=2, services={"judge": JUDGE}),
        launcher.daemon_argv("python", "service", PATHS, 7, "--name", "judge"),
    )
    nodes = launcher.nodes_of_step(config, (4,), "judge")
    argv = launcher.step_argv("srun", config, host, nodes=nodes, names=["n3", "n4"])
    assert {"--nodes=2", "--ntasks=2", "--nodelist=n3,n4", "--overlap"} <= set(argv)
    assert argv[-len(host) :] == host
    nodes = launcher.nodes_of_step(run_config(nodes=2, services={"apart": APART}), (2, 1), "apart")
    argv = launcher.step_argv("srun", config, host, het_size=2, nodes=nodes, cpus=8)
    assert {"--het-group=1", "--cpus-per-task=8"} <= set(argv)
    assert not [word for word in argv if word.startswith(("--nodes", "--nodelist"))]
