"""What submit finds out about the ranks' environment before anything is queued."""

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import msgspec
import pytest

import verl_slurm
from verl_slurm.base.errors import ConfigError, PermissionRefused
from verl_slurm.checks import good
from verl_slurm.config.schema import RunConfig, SlurmConfig
from verl_slurm.submit.checks.ranks_environment import (
    check_rank_environment,
    show_rank_environment,
    why_not_run,
)
from verl_slurm.submit.relative_paths import Places, find_python
from verl_slurm.submit.submission import plan_submission

PACKAGES = ("torch", "numpy")


def config(**keys: Any) -> RunConfig:
    fields = {name: keys.pop(name) for name in ("modules", "setup", "python") if name in keys}
    return msgspec.structs.replace(RunConfig(), slurm=SlurmConfig(**fields), **keys)


def make_venv(place: Path, *, with_ours: bool = True) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    if with_ours:
        ours = sysconfig.get_path("purelib")
        (next(place.glob("lib/python*/site-packages")) / "ours.pth").write_text(
            f"import site; site.addsitedir({ours!r})\n"
        )
    return place


def make_conda(place: Path) -> Path:
    """Stands for what conda makes: the folder by which an environment is told, and a Python."""
    (place / "conda-meta").mkdir(parents=True)
    (place / "bin").mkdir()
    (place / "bin/python").symlink_to(sys.executable)
    return place


def test_a_directory_that_is_no_environment_is_not_to_be_made_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such Python environment") as caught:
        find_python(str(tmp_path), Places(tmp_path))
    assert "venv" not in caught.value.remedy
    with pytest.raises(ConfigError, match="-m venv"):
        find_python(str(tmp_path / "new"), Places(tmp_path))
    with pytest.raises(ConfigError, match="no program"):
        find_python("./nothing", Places(tmp_path))


@pytest.mark.parametrize("tail", ["", "/", "/bin", "/bin/activate", "/bin/python"])
def test_a_virtual_environment_is_found_by_any_path_that_people_have_at_hand(
    tmp_path: Path, tail: str
) -> None:
    place = make_venv(tmp_path / "venv", with_ours=False)
    assert find_python(f"{place}{tail}", Places(tmp_path)) == str(place)
    assert find_python(f"./venv{tail}", Places(tmp_path)) == str(place)
    assert find_python("venv", Places(tmp_path)) == str(place)


def test_a_conda_environment_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MAMBA_ROOT_PREFIX", str(tmp_path / "mamba"))
    monkeypatch.delenv("CONDA_EXE", raising=False)
    by_mamba = make_conda(tmp_path / "mamba/envs/rl")
    elsewhere = make_conda(tmp_path / "project/other")
    (tmp_path / ".conda").mkdir()
    (tmp_path / ".conda/environments.txt").write_text(f"{elsewhere}\n{by_mamba}\n/gone/old\n")
    here = Places(tmp_path / "project")
    assert find_python("rl", here) == str(by_mamba)
    (tmp_path / "cwd").mkdir()
    assert find_python("other", Places(tmp_path / "cwd")) == str(elsewhere)
    with pytest.raises(ConfigError, match="one of conda's: other, rl"):
        find_python("rk", here)
    make_conda(tmp_path / "more/rl")
    (tmp_path / ".conda/environments.txt").write_text(f"{tmp_path / 'more/rl'}\n")
    with pytest.raises(ConfigError, match="several conda environments"):
        find_python("rl", here)


def test_the_python_is_asked_what_it_has(tmp_path: Path) -> None:
    whole, empty = make_venv(tmp_path / "good"), make_venv(tmp_path / "empty", with_ours=False)
    (said,) = check_rank_environment(config(python=str(whole)), PACKAGES)
    assert why_not_run(config(python=str(empty)), dry_run=False, stranger=False) == "", "one's own"
    assert f"{whole}/bin/python with verl-slurm {verl_slurm.__version__}, torch 2." in said.line
    with pytest.raises(ConfigError, match="no nosuchpackage"):
        check_rank_environment(config(python=str(whole)), ("nosuchpackage",))
    with pytest.raises(ConfigError, match=rf"found none, expected {verl_slurm.__version__}"):
        check_rank_environment(config(python=str(empty)), PACKAGES)


def test_a_python_that_does_not_answer_is_refused(tmp_path: Path) -> None:
    place = make_conda(tmp_path / "env")
    (place / "bin/python").unlink()
    (place / "bin/python").write_text("#!/bin/sh\necho no\n")
    (place / "bin/python").chmod(0o755)
    with pytest.raises(ConfigError, match="does not answer"):
        check_rank_environment(config(python=str(place)), PACKAGES)


@pytest.mark.parametrize("why", ["dry run", "others' configuration", "others' directory"])
def test_a_python_that_others_may_have_named_or_written_is_not_run(tmp_path: Path, why: str) -> None:
    place, witness = make_conda(tmp_path / "env"), tmp_path / "ran"
    (place / "bin/python").unlink()
    (place / "bin/python").write_text(f"#!/bin/sh\ntouch {witness}\n")
    (place / "bin/python").chmod(0o755)
    (place / "etc/conda/activate.d").mkdir(parents=True)
    (place / "etc/conda/activate.d/x.sh").write_text(f"touch {witness}\n")
    written = tmp_path / "my.yaml"
    written.write_text(
        "trainer: {backend: command, command: [-m, nothing]}\ndistributed: {device: cpu}\n"
        f"run_dir: {tmp_path}/run\nslurm: {{python: {place}, modules: [nothing]}}\n"
    )
    written.chmod(0o666 if why == "others' configuration" else 0o600)
    (place / "bin").chmod(0o777 if why == "others' directory" else 0o755)
    plan = plan_submission(written, [], cluster="local", dry_run=why == "dry run")
    assert not witness.exists()
    [note] = [note for note in plan.notes if note.startswith("slurm.modules and slurm.python: not looked at")]
    expected = {"dry run": "submit itself does", "others' directory": f"{place}/bin: mode 0777"}
    assert expected.get(why, "others own or may write the configuration") in note
    if why == "others' configuration":
        assert plan.notes.index(note) == 1
        assert "can have programs run as you" in plan.notes[0]
    assert not any("Python" in what or "modules" in what for what in plan.checked)
    assert not any("part of an installed package" in note for note in plan.notes)


def test_a_command_that_bash_cannot_read_is_refused_and_a_good_one_is_not_run(tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    said = check_rank_environment(config(setup=(f"touch {witness}",)), PACKAGES)
    assert said == [good("the syntax of slurm.setup (1, not run here)")]
    assert not witness.exists()
    with pytest.raises(ConfigError, match=r"slurm.setup\[1\].*unexpected"):
        check_rank_environment(config(setup=("true", "if true; then")), PACKAGES)


@pytest.mark.skipif(
    not Path("/usr/share/modules/init/bash").exists(), reason="NOT RUN: no Environment Modules here"
)
def test_a_module_that_this_machine_does_not_know_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good").write_text("#%Module\n")
    monkeypatch.setenv("MODULEPATH", str(tmp_path))
    assert check_rank_environment(config(modules=("good",)), PACKAGES) == [good("modules good")]
    with pytest.raises(ConfigError, match="module load cuda/99 failed"):
        check_rank_environment(config(modules=("good", "cuda/99")), PACKAGES)


def test_secrets_are_looked_at_and_never_shown(tmp_path: Path) -> None:
    assert (check_rank_environment(config(), PACKAGES), show_rank_environment(config())) == ([], "")
    secret = tmp_path / "key"
    wanted = config(env={"NCCL_DEBUG": "a b"}, env_from_files={"API_KEY": str(secret)})
    with pytest.raises(ConfigError, match=r"env_from_files.API_KEY.*No such file"):
        check_rank_environment(wanted, PACKAGES)
    secret.write_text("")
    secret.chmod(0o600)
    with pytest.raises(ConfigError, match="no value"):
        check_rank_environment(wanted, PACKAGES)
    secret.write_text("sesame")
    assert check_rank_environment(wanted, PACKAGES) == [good("variables NCCL_DEBUG, API_KEY")]
    assert show_rank_environment(wanted) == f"export NCCL_DEBUG='a b'\nexport API_KEY=...  # from {secret}"
    secret.chmod(0o644)
    with pytest.raises(PermissionRefused):
        check_rank_environment(wanted, PACKAGES)
