"""From a config to what is asked of the cluster."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from verl_slurm_daemon.agent.ranks import rank_environment
from verl_slurm_daemon.allocation.launcher import launcher_env

from verl_slurm.base.errors import ConfigError, DataError
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.changes import LAYOUT_KEYS, refuse_changes
from verl_slurm.config.elastic import keep_step
from verl_slurm.config.load import parse_config
from verl_slurm.config.schema import RunConfig
from verl_slurm.slurm.batch import (
    sbatch_options,
    sbatch_parameters,
    submission_environment,
    unwanted_environment,
)
from verl_slurm.slurm.facts import PartitionFacts
from verl_slurm.submit.checks.model_and_reward import (
    BUILTIN_DATA,
    RULES,
    build_builtins,
    built_before,
    cache_dir,
    check_names,
    needs_building,
)
from verl_slurm.submit.checks.model_files import BUILTIN_MODELS
from verl_slurm.submit.checks.slurm_answers import choose_cluster, partition_complaint
from verl_slurm.submit.relative_paths import absolute
from verl_slurm.wire.environment import SEARCH_VARIABLE, SERVICE_TOKEN_VARIABLE
from verl_slurm.wire.messages import Launch


def config(*overrides: str) -> RunConfig:
    return parse_config(b"", "my.yaml", overrides)


def facts(**changes: object) -> PartitionFacts:
    known: dict[str, object] = {
        "name": "gpu",
        "state": "UP",
        "total_nodes": 4,
        "total_cpus": 8,
        "max_time_s": None,
        "max_nodes": None,
        "grace_s": 0,
        "preempt_mode": "OFF",
        "is_default": True,
    }
    return PartitionFacts(**(known | changes))  # type: ignore[arg-type]


def test_the_script_has_what_is_asked_for_and_the_batch_process_alone_is_signalled() -> None:
    asked = config(
        "slurm.partition=gpu",
        "slurm.account=lab",
        "slurm.qos=high",
        "slurm.gpus_per_node=8",
        "slurm.mem_mb_per_node=2048",
        "slurm.signal_lead_s=30",
        "slurm.extra={constraint: a100, exclusive: true}",
    )
    parameters = sbatch_parameters(asked)
    additional = parameters.pop("additional_parameters")
    wanted = {
        "partition": "gpu",
        "gpus_per_node": 8,
        "mem": "2048MB",
        "use_srun": False,
        "ntasks_per_node": 1,
    }
    assert wanted.items() <= parameters.items()
    assert additional == {"signal": "B:USR1@30", "requeue": True} | {
        "account": "lab",
        "qos": "high",
        "constraint": "a100",
        "exclusive": True,
    }
    # The template gets the same as options.
    options = sbatch_options(asked)
    assert {"--partition=gpu", "--exclusive", "--requeue", "--signal=B:USR1@30", "--nodes=2"} <= set(options)
    assert not any("setup" in option or "srun" in option for option in options)
    bare = sbatch_parameters(config("slurm.extra={exclusive: false}"))
    assert not {"partition", "mem", "gpus_per_node"} & set(bare)
    assert "exclusive" not in str(bare)


def test_memory_and_gpus_in_other_words_stand_in_the_script_alone() -> None:
    words = ["slurm.gpus_per_node=2", "slurm.extra.gres=gpu:a100:2", "slurm.extra.mem=0"]
    options = sbatch_options(config(*words))
    assert {"--gres=gpu:a100:2", "--mem=0"} <= set(options)
    assert not any(option.startswith("--gpus") for option in options)
    beside = sbatch_options(config("slurm.gpus_per_node=2", "slurm.extra.gres=lustre:1"))
    assert {"--gpus-per-node=2", "--gres=lustre:1"} <= set(beside)


def test_a_run_that_a_program_of_another_submits_has_nothing_of_that_run(tmp_path: Path) -> None:
    """DPO after SFT: its metrics went into SFT's W&B run, and its code was SFT's copy."""
    mine = {"PATH": "/bin", "PYTHONPATH": "/repo", "WANDB_PROJECT": "p", "VERL_SLURM_DEVCLUSTER": "/dev"}

    def ranks(name: str, environ: dict[str, str]) -> dict[str, str]:
        guest = config("trainer.backend=command", "trainer.command=[/x/train.py]", f"name={name}")
        launch = Launch(restart=1, attempt=1, node_rank=0, master_addr="", master_port=0, resume="")
        environ = environ | {SEARCH_VARIABLE: environ["PYTHONPATH"], SERVICE_TOKEN_VARIABLE: "secret"}
        environ |= {"PYTHONPATH": f"/runs/{name}/code/digest"}
        return launcher_env(environ, guest, RunPaths(f"/runs/{name}"), launch, tmp_path / name)

    first = ranks("sft", mine)
    assert first["PYTHONPATH"] == "/runs/sft/code/digest"
    rank = rank_environment(first, 1, 0, 2, 1)
    submitted = submission_environment(rank, config())
    same = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    assert submitted == mine | same
    second = ranks("dpo", submitted)
    names = (
        "WANDB_RUN_ID",
        "SWANLAB_RUN_ID",
        "TENSORBOARD_DIR",
        "TORCH_FR_DUMP_TEMP_FILE",
        "VLLM_RPC_BASE_PATH",
    )
    assert not {first[name] for name in names} & {second[name] for name in names}
    said = mine | {"WANDB_RUN_ID": "mine", "GLOO_SOCKET_IFNAME": "ib0"}
    assert submission_environment(said, config()) == said | {"PYTHONSAFEPATH": "1"}, (
        "outside of a run they stay"
    )


def test_the_environment_of_a_surrounding_job_is_left_behind() -> None:
    names = [
        "PATH",
        "SLURM_CONF",
        "SLURM_JOB_ID",
        "SLURM_MEM_PER_NODE",
        "PMIX_RANK",
        "SBATCH_SIGNAL",
        "SBATCH_ACCOUNT",
    ]
    assert unwanted_environment(names, config()) == [
        "SLURM_JOB_ID",
        "SLURM_MEM_PER_NODE",
        "PMIX_RANK",
        "SBATCH_SIGNAL",
    ]
    assert "SBATCH_ACCOUNT" in unwanted_environment(names, config("slurm.account=lab"))


GRPO = ("train.algorithm=grpo", "rollout.samples_per_prompt=4")
LOOP = ("trainer.backend=command", "trainer.command=[train.py]")
OTHER_PLACE = ("slurm.partition=gpu", "daemon.crash_budget=1", "checkpoint.resume_from=/c/step_000001")
HELD_OUT, EVALUATED = ("data.eval_fraction=0.1",), ("train.eval_every_steps=5", "train.eval_temperature=0.5")


@pytest.mark.parametrize(
    ("before", "after", "options", "changed"),
    [
        ((), OTHER_PLACE, {}, ["checkpoint.resume_from", "slurm.partition", "daemon.crash_budget"]),
        ((), ("distributed.nodes=1",), {}, ["distributed.nodes"]),
        ((), ("seed=3",), {"begun": False}, ["seed"]),
        ((), ("train.steps=31",), {"steps_done": 30}, ["train.steps"]),
        ((), ("rollout.max_logprob_gap=0.1",), {}, ["rollout.max_logprob_gap"]),
        (HELD_OUT, HELD_OUT + EVALUATED, {}, ["train.eval_every_steps", "train.eval_temperature"]),
        (
            (),
            HELD_OUT,
            {},
            r"eval_fraction: 0\.0 -> 0\.1.*train.steps to 0.*run_dir=NEW.*, with checkpoint.resume_from=/run/",
        ),
        ((), ("seed=3",), {}, r"name=NEW run_dir=NEW\), with checkpoint.resume_from=/run/checkpoints/NAME"),
        (
            LOOP,
            (*LOOP, "seed=3"),
            {},
            r"shape of the ranks may change\)\); .*resume_from=/run/checkpoints/NAME",
        ),
        ((), GRPO, {}, r"samples_per_prompt: 1 -> 4; train\.algorithm: 'ppo' -> 'grpo'"),
        (
            (),
            ("train.steps=5", "distributed.threads_per_rank=2", "slurm.partition=gpu"),
            {"steps_done": 6},
            r"train\.steps: 30 -> 5; distributed\.threads_per_rank: 1 -> 2",
        ),
        (
            (),
            ("distributed.dp_size=4", "distributed.nodes=4"),
            {},
            r"expected train\.batch_size_per_device=32",
        ),
    ],
)
def test_a_run_goes_on_with_other_settings_and_not_with_another_training(
    before: tuple[str, ...], after: tuple[str, ...], options: dict[str, Any], changed: str | list[str]
) -> None:
    old, new = config(*before), config(*after)
    if isinstance(changed, list):
        assert refuse_changes(old, new, Path("/run"), **options) == changed
    else:
        with pytest.raises(ConfigError, match=changed):
            refuse_changes(old, new, Path("/run"), **options)


def test_a_run_may_go_on_with_another_number_of_ranks_where_a_step_stays_the_same() -> None:
    wider = config("distributed.dp_size=4", "distributed.nodes=4")
    assert set(refuse_changes(config(), keep_step(config(), wider), Path("/run"))) <= LAYOUT_KEYS


def test_paths_are_made_absolute_and_words_stay() -> None:
    given = config(
        "model.path=m", "data.root=../d", "data.eval_root=h", "model.reward=classifier:r", "name=x"
    )
    found = absolute(given, Path("/home/me/work"))
    assert found.model.path == "/home/me/work/m"
    assert found.model.reward == "classifier:/home/me/work/r"
    assert found.data.root == "/home/me/d"
    assert found.data.eval_root == "/home/me/work/h"
    assert found.run_dir == "/home/me/work/runs/x"
    assert absolute(config(), Path("/")).model.path == "builtin:tiny"
    assert absolute(config(), Path("/")).checkpoint.resume_from == "auto"
    assert absolute(found, Path("/elsewhere")) == found


def test_an_existing_run_keeps_the_built_in_it_was_started_with() -> None:
    older = str(cache_dir().parent / "0123456789ab" / "tiny")
    kept = built_before(config(), config(f"model.path={older}"))
    assert kept.model.path == older
    assert built_before(config(), config("model.path=/my/model")).model.path == "builtin:tiny"
    older = str(cache_dir().parent / "0123456789ab" / "heldout")
    now = config("data.eval_root=builtin:arithmetic")
    assert built_before(now, config(f"data.eval_root={older}")).data.eval_root == older


@pytest.mark.parametrize(
    ("words", "changes", "complaint"),
    [
        ([], {}, ""),
        ([], {"state": "DOWN"}, ""),
        ([], {"state": "DRAIN"}, "its state is DRAIN"),
        (["distributed.nodes=5", "distributed.dp_size=5"], {}, "4 nodes in it, 5 asked for"),
        (["slurm.spare_nodes=3"], {}, ""),
        (["distributed.nodes=5", "distributed.dp_size=5", "distributed.min_nodes=1"], {}, ""),
        ([], {"max_nodes": 1}, "at most 1 node a job, 2 asked for"),
        ([], {"max_time_s": 1800}, "at most 30 min a job, 60 asked for"),
        (["slurm.cpus_per_node=5"], {}, "8 CPUs in it, 2 x 5 asked for"),
    ],
)
def test_a_partition_that_can_never_run_the_job_is_noticed(
    words: list[str], changes: dict[str, object], complaint: str
) -> None:
    assert partition_complaint(config(*words), facts(**changes)) == complaint


def test_this_machine_is_chosen_only_where_there_is_no_slurm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    cluster, note = choose_cluster("auto")
    assert cluster == "local"
    assert "no Slurm here" in note
    assert choose_cluster("slurm") == ("slurm", "")
    (tmp_path / "sbatch").touch(mode=0o755)
    assert choose_cluster("auto") == ("slurm", "")


@pytest.mark.torch
def test_the_names_known_here_are_the_names_there_are() -> None:
    from verl_slurm.trainer.quickstart.__main__ import _HEAD_DIMS, resolve_data, resolve_model
    from verl_slurm.trainer.quickstart.tiny_model import _config, _tokenizer
    from verl_slurm.trainer.reward.scoring import RULES as REAL_RULES

    assert set(RULES) == set(REAL_RULES)
    for name, said in BUILTIN_MODELS.items():
        real = _config(_tokenizer(), _HEAD_DIMS[name])
        built = {"head_dim": real.hidden_size // real.num_attention_heads, **real.to_dict()}
        assert {key: built[key] for key in said} == said
    for names, resolve in ((BUILTIN_MODELS, resolve_model), (BUILTIN_DATA, resolve_data)):
        with pytest.raises(ConfigError) as caught:
            resolve("builtin:nosuch", Path("/nowhere"))
        assert caught.value.expected == " or ".join(f"builtin:{name}" for name in names)


def test_built_ins_lie_where_no_other_user_can_write_whatever_the_umask(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        (tmp_path / "cache" / "verl-slurm").mkdir(parents=True)
        built = build_builtins(config("model.path=some/where", "data.root=builtin:arithmetic"))
    finally:
        os.umask(before)
    places = [place for place in Path(built.data.root).parents if place.is_relative_to(tmp_path / "cache")]
    assert [oct(place.stat().st_mode & 0o077) for place in places[:-1]] == ["0o0"] * (len(places) - 1)
    assert cache_dir() in places


def test_a_built_in_is_built_once_where_the_next_look_finds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/cache")  # no room is there
    with pytest.raises(DataError, match="0.0 MB free, expected room for 4 MB.*XDG_CACHE_HOME"):
        check_names(config())
    assert cache_dir().name != hashlib.sha256().hexdigest()[:12], "it goes by the builder's code"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = config("data.root=builtin:arithmetic", "data.eval_root=builtin:arithmetic")
    assert needs_building(given)
    (cache_dir() / "tiny").mkdir(parents=True)
    assert not needs_building(given)
    built = build_builtins(given)
    assert built.model.path == str(cache_dir() / "tiny")
    assert list(Path(built.data.root).glob("*.jsonl"))
    assert built.data.eval_root is not None
    held_out, train = (Path(root) / "sums.jsonl" for root in (built.data.eval_root, built.data.root))
    assert not set(held_out.read_text().splitlines()) & set(train.read_text().splitlines())
