"""Services of a run before its job is queued: their programs and secrets, and the batch script with their nodes."""

import re
import sys
from pathlib import Path

import msgspec
import pytest

from tests.builders import run_config
from verl_slurm.base.errors import ConfigError, DataError, PermissionRefused
from verl_slurm.checks import good, skipped
from verl_slurm.config.schema import HooksConfig, RunConfig, ServiceConfig
from verl_slurm.slurm.batch import batch_script, component_lines, sbatch_parameters
from verl_slurm.submit.checks.user_programs import check_hooks, check_services
from verl_slurm.submit.executor import with_components
from verl_slurm.submit.relative_paths import Places, absolute


def with_service(*command: str, **keys: object) -> RunConfig:
    return run_config(services={"judge": ServiceConfig(command=command, **keys)})  # type: ignore[arg-type]


def test_a_relative_program_and_secret_lie_beside_the_yaml(tmp_path: Path) -> None:
    config = with_service("judge.py", "a.txt", env_from_files={"KEY": "key"})
    judge = absolute(config, Places(tmp_path, tmp_path / "sub/my.yaml")).services["judge"]
    assert judge.command == (str(tmp_path / "sub/judge.py"), "a.txt")
    assert judge.env_from_files == {"KEY": str(tmp_path / "sub/key")}
    by_path = absolute(with_service("redis-server"), Places(tmp_path)).services["judge"]
    assert by_path.command == ("redis-server",)


def test_a_program_that_is_not_there_is_refused_unless_modules_may_bring_it() -> None:
    for program in ("/missing/judge.py", "no-such-program-here"):
        with pytest.raises(ConfigError, match="a service cannot be started"):
            check_services(with_service(program))
    service = ServiceConfig(command=("no-such-program-here",))
    found = check_services(run_config(services={"judge": service}, modules=("redis",)))
    assert [one.verdict for one in found] == ["not checked"]
    assert "services.judge.command: no program no-such-program-here here" in found[0].line


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("-m", "no_such_module.part", "no no_such_module"),
        ("-m", "email", "no __main__.py in "),
        ("judge.py", "import no_such_module\n", "no no_such_module"),
        ("judge.py", "def (\n", "cannot be read"),
        ("judge", "#!/bin/no-such-shell\n", "no /bin/no-such-shell"),
        ("judge", "#!/usr/bin/env -S A=1 no-such-shell\n", "no no-such-shell"),
        ("judge", "echo\n", "text without an interpreter"),
        ("judge", f"#!{sys.executable}\nimport no_such_module\n", "no no_such_module"),
    ],
)
def test_a_service_and_a_hook_that_could_not_start_are_refused(
    tmp_path: Path, name: str, text: str, told: str
) -> None:
    program = tmp_path / name
    program.write_text(text)
    program.chmod(0o755)
    words = ("-m", text) if name == "-m" else (str(program), "--port", "{port}")
    with pytest.raises((ConfigError, DataError), match=re.escape(told)):
        check_services(with_service(*words))
    if name == "judge":
        with pytest.raises((ConfigError, DataError), match=re.escape(told)):
            check_hooks(msgspec.structs.replace(run_config(), hooks=HooksConfig(on_end=words)))


def test_what_a_shell_starts_is_not_called_good(tmp_path: Path) -> None:
    found = check_services(with_service("sh", "-c", "exec judge"))
    assert found == [skipped("services.judge.command: what sh starts")]
    (tmp_path / "near.py").touch()
    (tmp_path / "judge.py").write_text("import near\n")
    assert check_services(with_service(str(tmp_path / "judge.py"))) == [good("services judge")]
    # A service may have a search path of its own.
    own = with_service("-m", "near", env={"PYTHONPATH": str(tmp_path)})
    assert check_services(own) == [good("services judge")]


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("x")
    key.chmod(0o644)
    with pytest.raises(PermissionRefused):
        check_services(with_service("-m", "json.tool", env_from_files={"KEY": str(key)}))


def test_nodes_of_another_kind_are_a_component_of_their_own() -> None:
    keys = {
        "nodes": 1,
        "cpus": 4,
        "gpus": 2,
        "slurm": {"partition": "gpu", "constraint": "a b", "exclusive": True},
    }
    config = run_config(
        services={"judge": ServiceConfig(command=("-m", "judge"), **keys)},  # type: ignore[arg-type]
        partition="train",
        account="lab",
    )
    assert sbatch_parameters(config)["nodes"] == 2
    assert batch_script(config) == "heterogeneous.sbatch"
    script = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --requeue=expedite\n\nexec x\n"
    lines = with_components(script, config).splitlines()
    assert lines[3] == "#SBATCH hetjob"
    wanted = ["--nodes=1", "--cpus-per-task=4", "--gpus-per-node=2", "--account=lab", "--partition=gpu"]
    wanted += ["--constraint='a b'", "--exclusive", "--requeue=expedite", "--time=60", "--ntasks-per-node=1"]
    assert {f"#SBATCH {word}" for word in wanted} <= set(lines[4:-2])
    assert "#SBATCH --partition=train" not in lines
    assert lines[-2:] == ["", "exec x"]
    # Those of the same kind are asked for with those of the ranks.
    same = with_service("-m", "judge", nodes=3)
    assert (sbatch_parameters(same)["nodes"], component_lines(same)) == (5, [])
    assert with_components("#!/bin/bash\n#SBATCH --nodes=5\nexec x\n", same).count("#SBATCH") == 1
