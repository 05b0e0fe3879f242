"""What a checkpoint to resume from must be is asked before anything is queued."""

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.builders import run_config, write_config
from tests.checkpoint.conftest import FILES, manifest_of, owns_it, stage
from tests.journals import append_event
from verl_slurm.base.errors import (
    CheckpointCorrupt,
    ConfigError,
    DataError,
    KeyRefused,
    PermissionRefused,
    SlurmRefused,
)
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.commit import commit
from verl_slurm.checks import told
from verl_slurm.checks.bad_nodes import remember
from verl_slurm.cli.setup.init import find_offers
from verl_slurm.config.load import dump, parse_config
from verl_slurm.config.schema import DistributedConfig, RunConfig, ServiceConfig
from verl_slurm.plan.plan_facts import from_slurm
from verl_slurm.slurm.batch import obeyed_variables, unwanted_environment
from verl_slurm.slurm.slurm_client import SlurmClient
from verl_slurm.submit import check_list
from verl_slurm.submit.check_list import check_gpus, check_metrics_port, check_resume_from
from verl_slurm.submit.checks.model_files import check_model, layers_left_out
from verl_slurm.submit.checks.slurm_answers import (
    ask_slurm,
    judge_partitions,
    nodes_to_avoid,
    place_notes,
    refusal,
    shell_notes,
)


def _checkpoint(
    run: RunPaths, step: int = 1, *, critic: bool = True, config: bytes | None = None, safe_point: int = 0
) -> Path:
    files = {name: data for name, data in FILES.items() if critic or "critic" not in name}
    algorithm = "ppo" if critic else "grpo"
    own = f"train: {{algorithm: {algorithm}}}\nrollout: {{samples_per_prompt: 4}}\n".encode()
    staging = stage(run, step, safe_point, files | {"config.yaml": config or own})
    trained = {} if critic else {"trained": ("actor",)}
    return commit(staging, manifest_of(staging, **trained), attempt_check=owns_it)


def _config(place: Path, algorithm: str) -> RunConfig:
    words = [f"train.algorithm={algorithm}", "rollout.samples_per_prompt=4"]
    return parse_config(b"", "my.yaml", [*words, f"checkpoint.resume_from={place}"])


def test_a_run_starts_from_no_checkpoint_of_the_other_algorithm(tmp_path: Path) -> None:
    ppo = _checkpoint(RunPaths(private_dir(tmp_path / "ppo")))
    grpo = _checkpoint(RunPaths(private_dir(tmp_path / "grpo")), critic=False)
    check_resume_from(_config(ppo, "ppo"))
    check_resume_from(_config(grpo, "grpo"))
    with pytest.raises(ConfigError) as caught:
        check_resume_from(_config(ppo, "grpo"))
    assert caught.value.one_line() == (
        f"the checkpoint is of another algorithm: {ppo} (found train.algorithm=grpo, which trains actor, expected "
        "train.algorithm=ppo: the checkpoint holds actor and critic); resume with that algorithm; or start a new run "
        f"from the weights alone: `verl-slurm export {ppo} --to hf --out DIR`, then model.path=DIR"
    )
    with pytest.raises(ConfigError, match="expected train.algorithm=grpo: the checkpoint holds actor"):
        check_resume_from(_config(grpo, "ppo"))
    ppo.chmod(0o777)
    with pytest.raises(PermissionRefused, match="others could have written it: .*mode 0777.*chmod -R go-w"):
        check_resume_from(_config(ppo, "ppo"))
    ppo.chmod(0o700)
    (ppo / "config.yaml").chmod(0o666)
    with pytest.raises(PermissionRefused, match="others could have written it: .*config.yaml"):
        check_resume_from(_config(ppo, "ppo"))


def test_a_branch_of_a_run_is_told_with_each_key_that_differs(tmp_path: Path) -> None:
    former = parse_config(b"", "my.yaml", ["rollout.samples_per_prompt=4"])
    run = RunPaths(private_dir(tmp_path / "run"))
    place = _checkpoint(run, config=dump(former))
    words = [
        "train.actor_lr=0.5",
        "name=b",
        "rollout.samples_per_prompt=4",
        f"checkpoint.resume_from={place}",
    ]
    _, [said] = told(check_resume_from(parse_config(b"", "my.yaml", words)))
    assert (
        said
        == f"from step_000001 on with other keys than before: train.actor_lr: {former.train.actor_lr} -> 0.5"
    )
    with pytest.raises(ConfigError, match="found train.actor_lr: .*name one of a step's end"):
        at = _checkpoint(run, 3, config=dump(former), safe_point=5)
        check_resume_from(parse_config(b"", "my.yaml", [*words[:-1], f"checkpoint.resume_from={at}"]))
    for word, refused in {
        "train.batch_size_per_device=32": f"found train.batch_size_per_device=32.*export {place} .*model.path=DIR",
        "train.steps=1": "nothing is left to do after this checkpoint: .*raise train.steps",
    }.items():
        with pytest.raises(ConfigError, match=refused):
            check_resume_from(parse_config(b"", "my.yaml", [*words, word]))


def test_each_byte_of_a_checkpoint_to_resume_from_is_read_before_anything_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = _checkpoint(RunPaths(private_dir(tmp_path / "run")))
    assert told(check_resume_from(_config(place, "ppo"))) == (
        ["the checkpoint to resume from: every byte"],
        [],
    )
    (place / "critic/__0_0.distcp").write_bytes(b"critic weightz" * 100)
    with pytest.raises(CheckpointCorrupt, match="critic/__0_0.distcp"):
        check_resume_from(_config(place, "ppo"))
    monkeypatch.setattr(check_list, "MOST_READ", 10)
    said = told(check_resume_from(_config(place, "ppo")))
    assert said == (["the checkpoint to resume from: its manifest; the start reads every byte"], [])
    (place / "manifest.json").write_bytes(b"?")
    with pytest.raises(CheckpointCorrupt, match="manifest.json"):
        check_resume_from(_config(place, "ppo"))


@pytest.mark.parametrize("keeps", [{}, {"keep_every": 10}])
@pytest.mark.parametrize("lives", [True, False])
def test_a_checkpoint_that_its_living_run_will_remove_is_named_with_the_way_on(
    tmp_path: Path, keeps: dict[str, int], lives: bool
) -> None:
    source = RunPaths(private_dir(tmp_path / "a"))
    write_config(source, keep_last=3, **keeps)
    place = _checkpoint(source, 10)
    with subprocess.Popen(
        [sys.executable, "-c", "input()", str(source.logs)], stdin=subprocess.PIPE, text=True
    ) as controller:
        job = {"job_id": str(controller.pid), "cluster": "local", "host": socket.gethostname()}
        append_event(source, "started", attempt=1, **job)
        if not lives:
            controller.communicate("\n")
        said = told(check_resume_from(_config(place, "ppo")))
        if lives:
            controller.communicate("\n")
    assert (f"cp -a {place}" in str(said)) is (lives and not keeps), said


def test_a_metrics_port_has_its_token_before_anything_is_queued(tmp_path: Path) -> None:
    token = tmp_path / "token"
    words = ["observability.metrics_port=0", f"observability.token_file={token}"]
    config = parse_config(b"", "my.yaml", words)
    with pytest.raises(KeyRefused):
        check_metrics_port(config)
    write_file(token, b"t" * 64)
    assert check_metrics_port(config) == []
    # One that the network reaches is said; without a port nothing is.
    words = [f"observability.token_file={token}", "observability.metrics_host=0.0.0.0"]
    assert check_metrics_port(parse_config(b"", "my.yaml", words)) == []
    (note,) = check_metrics_port(parse_config(b"", "my.yaml", [*words, "observability.metrics_port=9464"]))
    assert "the whole network reaches" in note.line
    token.chmod(0o644)
    with pytest.raises(PermissionRefused):
        check_metrics_port(config)


@pytest.mark.parametrize(
    ("kind", "conf", "said"),
    [
        ("nfs4", {}, ""),
        ("tmpfs", {}, "lies in the memory of this machine (tmpfs)"),
        ("ext4", {}, "not looked at: whether the job's nodes see run_dir /tmp/runs, which is on a disk"),
        ("ext4", {"SlurmctldHost[0]": "me(127.0.0.1)"}, ""),
        ("nfs4", {"JobContainerType": "job_container/tmpfs"}, "each job has a /tmp of its own"),
    ],
)
def test_a_place_that_only_this_machine_has_is_said(
    monkeypatch: pytest.MonkeyPatch, kind: str, conf: dict[str, str], said: str
) -> None:
    monkeypatch.setattr("verl_slurm.submit.checks.slurm_answers.file_system", lambda _: kind)
    # The checkout that is tested may lie in /tmp as well.
    _, notes = told(place_notes(run_config(run_dir="/tmp/runs"), conf))
    notes = [note for note in notes if "/tmp/runs" in note]
    assert [said in note for note in notes] == [True] * bool(said)


def test_what_comes_with_the_shell_and_what_does_not_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (600 if kind == resource.RLIMIT_CPU else -1, -1))
    (note,) = shell_notes(run_config(), {}, {})
    assert "CPU 600 (ulimit -t)" in note.line
    monkeypatch.setattr(
        "resource.getrlimit", lambda kind: (64 if kind == resource.RLIMIT_MEMLOCK else -1, -1)
    )
    for keys in ({"nodes": 2}, {"nodes": 1, "gpus_per_node": 8}):
        assert shell_notes(run_config(**keys), {}, {}) == []
    assert "MEMLOCK 64 (ulimit -l)" in shell_notes(run_config(nodes=2, gpus_per_node=8), {}, {})[0].line
    monkeypatch.setattr("resource.getrlimit", lambda kind: (600 if kind == resource.RLIMIT_CPU else -1, -1))
    for conf, extra in (
        ({"PropagateResourceLimits": "NONE"}, {}),
        ({"PropagateResourceLimitsExcept": "CPU"}, {}),
        ({}, {"propagate": "NONE"}),
    ):
        assert shell_notes(run_config(extra=extra), conf, {}) == []
    free = {"PropagateResourceLimits": "NONE"}
    kept, dropped = shell_notes(run_config(), free, {"SBATCH_EXPORT": "NONE", "SBATCH_PARTITION": "a"})
    assert kept.line == "partition a, from SBATCH_PARTITION of this shell"
    assert dropped.line.startswith("SBATCH_EXPORT: not handed on")


SCONTROL = """#!/bin/sh
case "$*" in
*config*) echo 'ClusterName = here'; echo "JobSubmitPlugins = ${PLUGINS:-(null)}";;
*"partition "[a-z]*) echo "PartitionName=$3 Default=NO MaxTime=UNLIMITED TotalNodes=1 TotalCPUs=64 State=UP";;
*) echo "PartitionName=short Default=${DEFAULT:-YES} MaxTime=01:00:00 TotalNodes=1 TotalCPUs=64 State=${STATE:-UP}";;
esac
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Slurm whose default partition has a limit of an hour, and the others none."""
    for name in ("scontrol", "sbatch", "srun", "sinfo"):
        (private_dir(tmp_path / "bin") / name).write_text(SCONTROL)
        (tmp_path / "bin" / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=os.pathsep)


@pytest.mark.parametrize(
    ("partition", "shell", "judged"),
    [(None, "", "short"), (None, "long", "long"), ("own", "long", "own")],
    ids=["the default one", "the shell's", "the key's"],
)
def test_the_partition_that_is_judged_is_the_one_that_the_job_gets(
    slurm: None, monkeypatch: pytest.MonkeyPatch, partition: str | None, shell: str, judged: str
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", shell)
    config = run_config(partition=partition, time_limit_min=600, nodes=1, ranks=1)
    says = ask_slurm(config)
    planned = asyncio.run(from_slurm(config, SlurmClient()))[0]["notices_per_day"].basis
    assert (says.partition.name, planned.rpartition(" ")[2]) == (judged, judged)
    if judged == "short":
        with pytest.raises(SlurmRefused, match="at most 60 min a job, 600 asked for"):
            judge_partitions(config, says)
    else:
        assert judge_partitions(config, says) == []


@pytest.mark.parametrize(
    ("default", "found"),
    [("YES", "the default one, short, cannot run this job (at most 60 min"), ("NO", "no default partition")],
)
def test_a_partition_that_the_site_may_choose_is_left_to_sbatchs_verdict(
    slurm: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, default: str, found: str
) -> None:
    monkeypatch.setenv("DEFAULT", default)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config = run_config(time_limit_min=600, nodes=1, ranks=1)
    with pytest.raises(SlurmRefused):
        judge_partitions(config, ask_slurm(config))
    monkeypatch.setenv("PLUGINS", "lua")
    says = ask_slurm(config)
    (told,) = judge_partitions(config, says)
    assert told.verdict == "warning"
    assert found in told.line
    assert "JobSubmitPlugins=lua" in told.line
    remember("here", "n1", "GPUs: off the bus", Path("/runs/a"), 1.0)
    assert nodes_to_avoid(config, says)[0] == ()
    # One that is named is the job's.
    with pytest.raises(SlurmRefused, match="1 node in it, 2 asked for"):
        judge_partitions(run_config(partition="own"), ask_slurm(run_config(partition="own")))


def test_a_partition_that_is_down_takes_jobs_and_that_they_wait_is_said(
    slurm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATE", "DOWN")
    config = run_config(time_limit_min=60, nodes=1, ranks=1)
    (told,) = judge_partitions(config, ask_slurm(config))
    assert told.verdict == "warning"
    assert "short is DOWN: no job starts there until it is UP" in told.line
    (offer,) = find_offers(None, pytest.fail)
    assert offer.line.endswith(", the default, DOWN now")
    monkeypatch.setenv("STATE", "DRAIN")
    with pytest.raises(SlurmRefused, match="its state is DRAIN"):
        judge_partitions(config, ask_slurm(config))


def test_a_variable_that_a_key_replaces_is_neither_obeyed_nor_judged(
    slurm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_CLUSTERS", "elsewhere")
    with pytest.raises(SlurmRefused, match="SBATCH_CLUSTERS"):
        ask_slurm(run_config())
    assert ask_slurm(run_config(extra={"clusters": "here"})).conf["ClusterName"] == "here"
    # sbatch would take it for a service's component, too, and before the line of that.
    service = ServiceConfig(command=("a",), nodes=1, slurm={"partition": "big"})
    config = msgspec.structs.replace(RunConfig(), services={"judge": service})
    assert obeyed_variables({"SBATCH_PARTITION": "long"}, config) == {}
    assert "SBATCH_PARTITION" in unwanted_environment(["SBATCH_PARTITION"], config)


def test_what_is_refused_by_a_variable_of_the_shell_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "lab")
    assert refusal(run_config(), "Invalid account specified").where == "SBATCH_ACCOUNT=lab"
    assert refusal(run_config(account="own"), "Invalid account").where == "slurm.account=own"


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1234567\n"


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "config.json"])
def test_a_pointer_of_git_lfs_in_a_model_is_told_with_the_command_that_fetches_it(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(DataError, match=f"pointer of Git LFS.*{name}.*git -C .* lfs pull"):
        check_model("model.path", tmp_path)


def test_layers_that_config_json_and_the_weights_do_not_have_in_common_are_said(tmp_path: Path) -> None:
    tensors = {
        f"model.layers.{n}.w": {"dtype": "F32", "shape": [1], "data_offsets": [4 * n, 4 * n + 4]}
        for n in (0, 1)
    }
    header = json.dumps(tensors).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    for layers, said in {1: "the last ones are left out", 2: "", 3: "the model lacks layers"}.items():
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": "llama", "num_hidden_layers": layers})
        )
        if layers == 3:
            with pytest.raises(DataError, match=said):
                layers_left_out(tmp_path)
        else:
            assert said in str(layers_left_out(tmp_path))


def test_a_tokenizer_that_was_cut_is_refused_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 9}')
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    check_model("model.path", tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a":')
    with pytest.raises(DataError, match="tokenizer is damaged: .*tokenizer.json"):
        check_model("model.path", tmp_path)


CUDA = msgspec.structs.replace(RunConfig(), distributed=DistributedConfig(device="cuda"))


def test_what_speaks_against_a_gpu_is_a_note_on_slurm_and_refused_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver, signs = tmp_path / "version", [tmp_path / "version"]
    monkeypatch.setattr(check_list, "version", lambda _: "2.13.0")
    with pytest.raises(ConfigError, match="no NVIDIA driver"):
        check_gpus(CUDA, "local", signs=signs)
    assert check_gpus(CUDA, "slurm", signs=signs) == [], "a login node need not have one"
    driver.touch()
    assert check_gpus(CUDA, "local", signs=signs) == []
    monkeypatch.setattr(check_list, "version", lambda _: "2.13.0+cpu")
    (note,) = check_gpus(CUDA, "slurm", signs=())
    assert "torch 2.13.0+cpu of this environment is built without CUDA" in note.line
    assert note.remedy == (
        f"{sys.executable} -m pip install --force-reinstall -c constraints/cuda.txt torch"
    ), "without force it is installed already"
    with pytest.raises(ConfigError, match=r"torch 2\.13\.0\+cpu, built without CUDA"):
        check_gpus(CUDA, "local", signs=signs)
    # A run that asks for none is told nothing.
    assert check_gpus(RunConfig(), "local", signs=()) == []
