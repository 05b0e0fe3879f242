"""The command lines of a generation."""

from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser
from verl_slurm_daemon.launcher import agent_argv, launcher_argv, launcher_env, step_argv

from verl_slurm.config.schema import RunConfig
from verl_slurm.paths import RunPaths
from verl_slurm.wire.messages import Launch

PATHS = RunPaths("/shared/me/run")
LAUNCH = Launch(
    generation=2, epoch=7, node_rank=1, master_addr="10.0.0.1", master_port=29500, resume="step_000004"
)


@pytest.mark.torch
def test_torchrun_understands_its_command_and_hands_ours_on() -> None:
    argv = launcher_argv("python", RunConfig(), PATHS, LAUNCH, Path("/run/x"))
    args = get_args_parser().parse_args(argv[4:])
    assert (args.nnodes, args.node_rank, args.master_addr, args.master_port) == ("2", 1, "10.0.0.1", 29500)
    assert args.max_restarts == 0
    assert args.module
    assert args.training_script == "verl_slurm.trainer"
    assert args.training_script_args == ["--run", "/shared/me/run", "--epoch", "7", "--resume", "step_000004"]


def test_torchrun_leaves_slurms_warnings_alone() -> None:
    argv = launcher_argv("python", RunConfig(), PATHS, LAUNCH, Path("/run/x"))
    assert "--signals-to-handle=SIGQUIT" in argv


def test_a_step_has_one_agent_a_node_and_no_opinion_about_their_ends() -> None:
    argv = step_argv("srun", RunConfig(), agent_argv("python", PATHS, 7))
    assert "--ntasks=2" in argv
    assert "--kill-on-bad-exit=0" in argv
    assert argv[-9:] == agent_argv("python", PATHS, 7)


def test_no_secret_is_on_a_command_line_or_in_the_environment() -> None:
    env = launcher_env({"PATH": "/bin"}, RunConfig(), Path("/run/x"))
    assert set(env) == {
        "PATH",
        "VERL_SLURM_CONTROL",
        "TOKENIZERS_PARALLELISM",
        "PYTHONUNBUFFERED",
        "PYTHONSAFEPATH",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
    }
