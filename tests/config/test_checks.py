"""Which values go together: what is refused before anything is queued, and what is taken and kept in run.yaml."""

from pathlib import Path

import pytest

from tests.builders import run_config
from verl_slurm.base.errors import ConfigError
from verl_slurm.config.changes import may_change
from verl_slurm.config.checks.options import OWN_OPTIONS
from verl_slurm.config.checks.shared import complaints
from verl_slurm.config.load import dump, load, parse_config
from verl_slurm.config.roles import data_root, trained_roles
from verl_slurm.config.schema import RunConfig, ServiceConfig, nodes_of_components, nodes_of_services

DIGEST = "sha256:" + "0" * 64
GRPO = "train: {algorithm: grpo}\nrollout: {samples_per_prompt: 8}\n"
GUEST = "trainer: {backend: command, command: [a.py]}\n"
VERL = "trainer: {backend: verl}\n"


def container(text: str) -> str:
    return f"slurm: {{container: {{{text}}}}}\n"


def service(text: str = "", name: str = "judge") -> str:
    return f"services: {{{name}: {{command: [judge.py]{text and ', '}{text}}}}}\n"


def tier(text: str = "", *, kind: str = "kind: s3, bucket: my-bucket") -> str:
    return f"tiers: [{{name: store, {kind}{text and ', '}{text}}}]\n"


PARTIAL = "checkpoint: {partial_every_steps: 1, components: "
ADAPTIVE = "checkpoint: {cadence: adaptive, intervals: "
BAD = [
    # names, places, shape
    ("name: ../up", "my.yaml: name "),
    ("name: -rf", "my.yaml: name "),
    ("run_dir: runs/{user}", "my.yaml: run_dir "),
    ("data: {root: ''}", "my.yaml: data.root "),
    ("data: {eval_root: ' '}", "data.eval_root"),
    ("data: {files: ../x}", "data.files"),
    ("model: {reward: arithmetic}", "my.yaml: model.reward "),
    ("distributed: {tp_size: 3, dp_size: 1}", "my.yaml: distributed.nodes "),
    ("distributed: {dp_size: 3}", "my.yaml: distributed.nodes "),
    ("distributed: {pp_size: 2}", "my.yaml: distributed.pp_size "),
    ("distributed: {dp_size: 4, nodes: 4, min_nodes: 3}", "my.yaml: distributed.min_nodes "),
    ("distributed: {nodes: 1}\nslurm: {spare_nodes: 1}", "my.yaml: slurm.spare_nodes "),
    (service("nodes: 1") + "slurm: {spare_nodes: 1}", "my.yaml: slurm.spare_nodes "),
    ("distributed: {mixed_precision: bfloat16}\nmodel: {dtype: bfloat16}", "distributed.mixed_precision"),
    ("distributed: {device: cuda}", "my.yaml: slurm.gpus_per_node "),
    ("slurm: {time_limit_min: 2}", "slurm.signal_lead_s"),
    ("daemon: {save_margin_s: 120}", "daemon.save_margin_s"),
    # batches and algorithms
    ("train: {mini_batch_size_per_device: 33}", "my.yaml: train.mini_batch_size_per_device "),
    ("train: {algorithm: grpo}", "rollout.samples_per_prompt (found 1, expected 2 or more"),
    (
        "train: {algorithm: grpo}\nrollout: {samples_per_prompt: 8, micro_batch_size_per_device: 4}",
        "found 4, expected a multiple of rollout.samples_per_prompt=8",
    ),
    ("rollout: {samples_per_prompt: 3}", "train.batch_size_per_device=66"),
    ("train: {kl_in: loss, kl_estimator: k1}", "set train.kl_estimator=auto"),
    ("train: {advantage_scale: none}", "or set train.algorithm=grpo"),
    ("train: {loss_aggregation: token}", "expected token_mean or sequence_mean or fixed_length"),
    ("rollout: {tensor_parallel_size: 2}", "every rank samples alone"),
    ("rollout: {engine: vllm, tensor_parallel_size: 2}", "a divisor of the ranks of one node"),
    ("rollout: {engine: sglang}", "rollout.engine"),
    ("rollout: {max_logprob_gap: 0}", "rollout.max_logprob_gap"),
    ("rollout: {gpu_memory_utilization: 1.0}", "rollout.gpu_memory_utilization"),
    # schedules and evaluation
    ("train: {warmup_steps: 31}", "my.yaml: train.warmup_steps "),
    ("train: {lr_schedule: wsd}", "train.lr_decay_steps (found 0, expected 1 to 30"),
    ("train: {lr_schedule: wsd, warmup_steps: 5, lr_decay_steps: 26}", "expected 1 to 25"),
    ("train: {lr_decay_steps: 3}", "only wsd has it"),
    ("train: {lr_min_ratio: 0.1}", "a rate that never falls"),
    ("train: {eval_every_steps: 5}", "data.eval_root or data.eval_fraction"),
    ("data: {eval_root: a, eval_fraction: 0.1}", "one of the two"),
    ("data: {eval_fraction: 1.0}", "data.eval_fraction"),
    ("checkpoint: {keep_best: 1}", "of evaluations that are never made"),
    ("checkpoint: {keep_best: 1, best_metric: 'a b'}", "'a b', which no step of this run has"),
    # saves
    ("checkpoint: {intervals: [{every: 5}]}", "my.yaml: checkpoint.cadence "),
    (ADAPTIVE + "[{every: 5, until_step: 9}]}", "nothing for the steps after 9"),
    (ADAPTIVE + "[{every: 5}, {every: 9}]}", "row 1 of 2 without until_step"),
    (ADAPTIVE + "[{every: 1, until_step: 9}, {every: 2, until_step: 9}, {every: 3}]}", "until_step rising"),
    ("checkpoint: {cadence: young_daly, every_steps: 5, min_every_steps: 6}", "checkpoint.min_every_steps"),
    ("checkpoint: {components: [actor]}", "my.yaml: checkpoint.partial_every_steps "),
    ("checkpoint: {partial_every_steps: 5}", "my.yaml: checkpoint.components "),
    ("checkpoint: {include_optimizer: true}", "my.yaml: checkpoint.include_optimizer "),
    (PARTIAL + "[actor, actor]}", "each component once"),
    (GRPO + PARTIAL + "[critic]}", "what train.algorithm=grpo trains: actor"),
    (GRPO + PARTIAL + "[actor], include_optimizer: true}", "found all of them, and the optimizer"),
    # options of sbatch
    ("slurm: {partition: a b}", "sinfo -s"),
    ("slurm: {partition: 'a,,b'}", "sinfo -s"),
    ("slurm: {partition: '-a'}", "sinfo -s"),
    ("slurm: {partition: 'debug*'}", "no part of the name"),
    ("slurm: {account: --wrap}", "my.yaml: slurm.account "),
    ('slurm: {extra: {comment: "x\\n#SBATCH --uid=0"}}', "my.yaml: slurm.extra.comment "),
    ("slurm: {extra: {-J: x}}", "sbatch's long name without dashes"),
    ("slurm: {gpus_per_node: 'a100:2'}", "slurm.gpus_per_node=2 and slurm.extra.gres=gpu:a100:2"),
    ("slurm: {gpus_per_node: 2, extra: {gpus-per-node: 'a100:2'}}", "slurm.extra.gres=gpu:TYPE:2"),
    ("slurm: {extra: {cpus-per-gpu: 8}}", "slurm.cpus_per_node=N"),
    ("slurm: {mem_mb_per_node: 9, extra: {mem-per-cpu: 1}}", "set slurm.mem_mb_per_node=0"),
    ("slurm: {mem_mb_per_node: 9, extra: {mem: 0}}", "slurm.mem_mb_per_node says it"),
    ("slurm: {extra: {deadline: now+1hour}}", "slurm.time_limit_min"),
    ("slurm: {extra: {clusters: 'a,b'}}", "name one of them"),
    # the ranks' environment
    ("env: {SLURM_JOB_ID: 1}", "a variable that Slurm or the daemon sets"),
    ("env: {RANK: 1}", "a variable that Slurm or the daemon sets"),
    ("env: {OMP_NUM_THREADS: 4}", "set distributed.threads_per_rank"),
    ("env_from_files: {WORLD_SIZE: /x}", "a variable that Slurm or the daemon sets"),
    ("env: {9X: 1}", "not a variable's name"),
    ("env: {X: 1.5}", "my.yaml:1: env.X (found 1.5, expected text or whole number)"),
    ("env: {X: true}", "env.X"),
    *((f"env: {{{name}: sesame}}", f"env_from_files: {{{name}: PATH}}") for name in (
        "HF_TOKEN", "WANDB_API_KEY", "db_password", "AWS_SECRET_ACCESS_KEY",
    )),
    ("env: {A: 1}\nenv_from_files: {A: /x}", "one of them"),
    ("slurm: {modules: ['a b']}", "a module's name"),
    ("slurm: {modules: ['-f']}", "a module's name"),
    ("slurm: {setup: ['']}", "a command for bash"),
    ("slurm: {python: -c}", "slurm.python"),
    ("slurm: {python: rl, container: {image: /i.sif}}", "slurm.container.python"),
    # images
    (container("image: ''"), "a path or a name"),
    (container("image: -i.sif"), "a path or a name"),
    (container("image: docker://nvcr.io/me/i:1.0"), "a file, or a name with its digest: NAME@sha256:..."),
    (container("image: localhost/i, runtime: podman"), "a file, or a name with its digest: NAME@sha256:..."),
    (container("image: i@sha256:12, runtime: pyxis"), "a file, or a name with its digest: NAME@sha256:..."),
    (container("image: /i.sif, runtime: podman"), "podman runs no file"),
    (container("image: /i.sif, digest: abc"), "sha256: and 64 hexadecimal digits"),
    (container(f"image: i@{DIGEST}, digest: '{DIGEST}'"), "write it behind the name: NAME@sha256:..."),
    (container("image: /i.sif, runtime: enroot"), "slurm.container.runtime"),
    (container("image: /i.sif, python: -c"), "slurm.container.python"),
    (container("image: /i.sif, binds: [data]"), "an absolute path without `,` and `:`"),
    (container("image: /i.sif, binds: ['/a:/b']"), "an absolute path without `,` and `:`"),
    (container("image: /i.sif, workdir: w"), "an absolute path in the image"),
    (container("image: /i.sif, extra_args: [sh]"), "an option with its value in one word"),
    (container("image: /i.sif, extra_args: ['--']"), "an option with its value in one word"),
    (container("image: /i.sif, extra_args: [--bind=/a:/b]"), "an option that the daemon does not set itself"),
    (container("image: /i.sif, extra_args: [--env=TOKEN=sesame]"), "use env, or env_from_files"),
    (container("image: /i.sif, extra_arg: []"), "expected no `extra_arg` in it"),
    # services
    (service(name="Judge"), "my.yaml: services.Judge "),
    (service(name="judge-1"), "my.yaml: services.judge-1 "),
    (service(name="token"), "my.yaml: services.token "),
    (service(name="index"), "my.yaml: services.index "),
    (service("probe: health"), "my.yaml: services.judge.probe "),
    (service("probe: /a b"), "my.yaml: services.judge.probe "),
    (service("port: 80"), "my.yaml: services.judge.port "),
    (service("gpus: 1"), "my.yaml: services: gpus of judge "),
    (service("cpus: 1"), "my.yaml: services: cpus of judge "),
    (service("nodes: 1, cpus: 2"), "my.yaml: services.judge.cpus "),
    (service("nodes: 1, gpus: 1"), "my.yaml: services.judge.gpus "),
    (service("slurm: {partition: cpu}"), "my.yaml: services.judge.slurm "),
    (service("nodes: 1, slurm: {nodes: 2}"), "my.yaml: services.judge.slurm.nodes "),
    (service('nodes: 1, slurm: {comment: "a\\n#SBATCH -N 9"}'), "services.judge.slurm.comment"),
    (service("env: {API_KEY: sesame}"), "my.yaml: services.judge.env.API_KEY "),
    (service("env: {VERL_SLURM_PORT: 1}"), "my.yaml: services.judge.env.VERL_SLURM_PORT "),
    (service("nodes: one"), "services.judge.nodes"),
    (service("nods: 1"), "services.judge (found"),
    ("services: {sandbox: {command: [y]}, judge: {nodes: 1}}", "`command` in it"),
    (f"services: {{{', '.join(f's{n}: {{command: [x], port: 8000}}' for n in (1, 2))}}}", "port 8000 twice"),
    # hooks and ports
    ("hooks: {on_end: ['']}", "a program and its arguments"),
    ("hooks: {on_end: [-c, x]}", "a program and its arguments"),
    ("hooks: {on_end: tell.sh}", "hooks.on_end"),
    ("hooks: {webhook: 'ftp://host/x'}", "https://HOST/"),
    ("hooks: {webhook: 'file:///etc/passwd'}", "https://HOST/"),
    ("hooks: {webhook: 'https://[sesame'}", "https://HOST/"),
    ("hooks: {webhook: 'https://me:sesame@host/'}", "a user or a password"),
    ("hooks: {webhook: 'http://host/sesame', webhook_token_file: /t}", "in the clear"),
    ("hooks: {webhook_token_file: /t}", "hooks.webhook, which it is for"),
    ("hooks: {timeout_s: 0}", "hooks.timeout_s"),
    ("observability: {metrics_port: 80}", "my.yaml: observability.metrics_port "),
    ("observability: {metrics_port: 0, metrics_host: 0.0.0.0}", "my.yaml: observability.metrics_host "),
    ("observability: {metrics_port: 0, token_file: token}", "my.yaml: observability.token_file "),
    ('observability: {metrics_port: 0, targets_dir: "targets\\n"}', "my.yaml: observability.targets_dir "),
    *((f"observability: {{metrics_port: {port}}}", "metrics_port") for port in ("65535", "-1", "70000", "yes")),
    # tiers
    (tier("name: checkpoints").replace("name: store, ", ""), "my.yaml: tiers[0].name "),
    (tier("name: Über").replace("name: store, ", ""), "my.yaml: tiers[0].name "),
    (tier(kind="kind: ftp, bucket: my-bucket"), "my.yaml: tiers[0].kind "),
    (tier("prefix: ../x"), "my.yaml: tiers[0].prefix "),
    (tier("prefix: /x"), "my.yaml: tiers[0].prefix "),
    (tier("prefix: .hidden"), "my.yaml: tiers[0].prefix "),
    (tier(kind="kind: s3"), "my.yaml: tiers[0] "),
    (tier("path: /x"), "my.yaml: tiers[0] "),
    (tier(kind="kind: posix, path: relative"), "my.yaml: tiers[0].path "),
    (tier(kind="kind: s3, bucket: UPPER"), "my.yaml: tiers[0].bucket "),
    (tier("endpoint: 'http://s3.example.org'"), "my.yaml: tiers[0].endpoint "),
    (tier("endpoint: 'https://me:sesame@s3.example.org'"), "my.yaml: tiers[0].endpoint "),
    (tier("endpoint: 'https://s3.example.org/sesame?x'"), "my.yaml: tiers[0].endpoint "),
    (tier("endpoint: 'file:///etc'"), "my.yaml: tiers[0].endpoint "),
    (tier("endpoint: ''"), "my.yaml: tiers[0].endpoint "),
    (tier("keep_days: 9", kind="kind: archive, bucket: my-bucket"), "my.yaml: tiers[0].keep_days "),
    (tier("storage_class: STANDARD_IA", kind="kind: posix, path: /x"), "my.yaml: tiers[0].storage_class "),
    (tier("storage_class: DEEP_ARCHIVE"), "my.yaml: tiers[0].verify "),
    ("tiers: [{name: a, kind: posix, path: /a}, {name: a, kind: posix, path: /b}]", "tiers[1].name"),
    # loops that are not ours
    ("verl: {a: 1}", "my.yaml: verl "),
    ("trainer: {entry: sft}", "my.yaml: trainer.entry "),
    ("trainer: {backend: command}", "my.yaml: trainer.command "),
    ("trainer: {backend: verl, entry: sft, command: [a.py]}", "my.yaml: trainer.command "),
    (VERL + "train: {steps: 5}", "my.yaml: train.steps "),
    (VERL + "model: {path: /m}", "my.yaml: model.path "),
    (VERL + "distributed: {dp_size: 4, tp_size: 2}", "my.yaml: distributed.tp_size "),
    (VERL + "data: {prompt_key: x}", "my.yaml: data.prompt_key "),
    (GUEST + "rollout: {engine: vllm}", "my.yaml: rollout.engine "),
    (GUEST + "checkpoint: {cadence: young_daly}", "my.yaml: checkpoint.cadence "),
    ("trainer: {backend: verl}\ncheckpoint: {local_dir: /nvme}", "my.yaml: checkpoint.local_dir "),
    (GUEST + "checkpoint: {keep_best: 3}", "my.yaml: checkpoint.best_metric "),
]  # fmt: skip


@pytest.mark.scenario("M08", "M13")
@pytest.mark.parametrize(("text", "part"), BAD)
def test_what_cannot_work_is_refused_in_a_line_that_repeats_no_secret(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text.encode(), "my.yaml")
    for line in caught.value.lines():
        assert "\n" not in line
        assert "; " in line, "a refusal without a remedy"
        assert "sesame" not in line
    assert part in caught.value.one_line()


GOOD = [
    GRPO,
    "distributed: {dp_size: 4, nodes: 4, min_nodes: 2}",
    "distributed: {dp_size: 4, nodes: 2}\nslurm: {spare_nodes: 1}",
    "rollout: {samples_per_prompt: 4}\ntrain: {kl_in: loss, clip_ratio_high: 0.28}",
    "rollout: {engine: vllm, tensor_parallel_size: 2}\ndistributed: {dp_size: 4}",
    "train: {lr_schedule: wsd, lr_decay_steps: 30}",
    "train: {lr_schedule: cosine, lr_min_ratio: 0.1}",
    "train: {eval_every_steps: 5}\ndata: {eval_fraction: 0.1}\ncheckpoint: {keep_best: 2}",
    "train: {eval_every_steps: 5}\ndata: {eval_root: 'builtin:arithmetic'}",
    "checkpoint: {keep_best: 2, best_metric: kl, best_mode: min}",
    "data: {eval_fraction: 0.1}",  # held out all the same
    "env: {NCCL_DEBUG: WARN, lower_case: 1, B: ''}\nenv_from_files: {WANDB_API_KEY: ~/key}",
    "slurm: {modules: [cuda/12.4, gcc], setup: ['source /opt/site.sh'], python: rl}",
    container("image: /i.sif"),
    container("image: ../images/i.sif"),
    container(f"image: 'docker://nvcr.io/me/i@{DIGEST}'"),
    container("image: i.sqsh, runtime: pyxis"),
    container("image: /i.sqsh, runtime: pyxis"),
    container(f"image: 'nvcr.io#me/i@{DIGEST}', runtime: pyxis"),
    container(f"image: localhost/i@{DIGEST}, runtime: podman"),
    container(f"image: /i.sif, digest: '{DIGEST}', workdir: /w, extra_args: [--fakeroot]"),
    service("nodes: 1, gpus: 4, cpus: 64, slurm: {partition: gpu, mem: 1T}"),  # nodes of another kind
    f"services: {{{', '.join(f's{n}: {{command: [x], port: 8000, nodes: 1}}' for n in (1, 2))}}}",
    "observability: {metrics_port: 9464}",
    "observability: {metrics_port: 0, metrics_host: 0.0.0.0, token_file: /keys/metrics}",
    tier("endpoint: 'http://127.0.0.1:9000'"),
    tier("endpoint: 'http://far.example', insecure: true"),
    tier("keep_days: 7", kind="kind: posix, path: /local/scratch"),
    tier("storage_class: DEEP_ARCHIVE, verify: checksum", kind="kind: archive, bucket: my-archive"),
    tier("options: {robot: '2'}", kind="kind: 'plugin:tape'"),
]


@pytest.mark.parametrize("text", GOOD)
def test_what_goes_together_is_taken_and_kept_in_run_yaml(text: str, tmp_path: Path) -> None:
    config = parse_config(text.encode(), "my.yaml")
    (tmp_path / "run.yaml").write_bytes(dump(config))
    assert load(tmp_path / "run.yaml") == config != RunConfig()


def test_no_port_is_open_unless_asked_for() -> None:
    assert RunConfig().observability.metrics_port is None
    assert RunConfig().observability.metrics_host == "127.0.0.1"


def test_an_option_that_submit_sets_itself_is_always_refused() -> None:
    for option in OWN_OPTIONS:
        config = run_config(extra={option: True}, mem_mb_per_node=1, gpus_per_node=1)
        assert [c.key for c in complaints(config)] == [f"slurm.extra.{option}"]


_EVALUATED = "\ntrain: {eval_every_steps: 5}\ndata: {eval_fraction: 0.1}"


@pytest.mark.parametrize(
    ("metric", "rest", "known", "unknown", "near"),
    [
        ("rewrad", "", "reward", "eval/reward", "reward"),
        ("critic_grad_nrom", "", "critic_grad_norm", "kl_loss", "critic_grad_norm"),
        ("step_s", "", "kl", "step_s", "reward"),  # a time: no checkpoint has it
        ("eval/rewrad", _EVALUATED, "eval/reward", "kl_loss", "eval/reward"),
        ("value_loss", f"\n{GRPO}", "kl", "value_loss", "reward"),
        ("kl_los", "\ntrain: {kl_in: loss}", "kl_loss", "eval/reward", "kl_loss"),
    ],
)
def test_a_metric_that_no_step_of_the_run_will_have_is_refused_with_those_it_will_have(
    metric: str, rest: str, known: str, unknown: str, near: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"checkpoint: {{keep_best: 1, best_metric: {metric}}}{rest}\n".encode(), "my.yaml")
    (found,) = caught.value.lines()
    listed = found.partition("expected one of ")[2].partition(")")[0].split(", ")
    assert known in listed
    assert unknown not in listed
    assert found.endswith(f"e.g. checkpoint.best_metric={near}")


def test_each_algorithm_trains_its_own_models() -> None:
    assert trained_roles(RunConfig().train) == ("actor", "critic")
    assert trained_roles(parse_config(GRPO.encode(), "my.yaml").train) == ("actor",)
    quick = load(Path(__file__).parents[2] / "configs" / "quickstart_grpo.yaml")
    assert trained_roles(quick.train) == ("actor",)
    assert quick.train.batch_size_per_device // quick.rollout.samples_per_prompt == 64
    assert quick.train.kl_in == "loss"


def test_a_word_of_the_command_line_sets_one_key_of_one_service() -> None:
    config = parse_config(b"services: {judge: {command: [x]}}", "my.yaml", ["services.judge.nodes=2"])
    assert config.services["judge"] == ServiceConfig(command=("x",), nodes=2)


def test_the_ranks_have_the_first_nodes_and_components_of_their_own_come_last() -> None:
    services = {
        "judge": ServiceConfig(command=("x",), nodes=2, slurm={"partition": "gpu"}),
        "beside": ServiceConfig(command=("x",)),
        "sandbox": ServiceConfig(command=("x",), nodes=3),
    }
    places = {"beside": range(1), "sandbox": range(4, 7), "judge": range(7, 9)}
    assert nodes_of_services(4, services) == places
    assert nodes_of_components(4, services) == [7, 2]
    assert run_config(nodes=4, services=services).all_nodes == 9


def test_what_changes_no_number_may_change_between_two_submissions() -> None:
    free = "env.A env_from_files.A slurm.setup slurm.modules slurm.python slurm.container.image hooks.on_end"
    free += " slurm.container.digest services.judge.nodes services.judge.slurm.partition"
    assert all(may_change(key) for key in [*free.split(), "services.judge.env_from_files.KEY"])
    assert not may_change("services.judge.command")
    assert not may_change("services.judge.env.MODEL")


def test_on_ray_one_process_speaks_and_every_node_listens_for_it() -> None:
    ppo = parse_config(f"{VERL}distributed: {{dp_size: 8, nodes: 4}}".encode(), "x.yaml")
    assert (ppo.speakers, ppo.speakers_on(3)) == (1, range(1))
    sft = parse_config(b"trainer: {backend: verl, entry: sft}\ndistributed: {dp_size: 8, nodes: 4}", "x.yaml")
    assert (sft.speakers, sft.speakers_on(3)) == (8, range(6, 8))


def test_a_guest_has_data_only_where_it_was_said() -> None:
    assert data_root(RunConfig()) is not None
    assert data_root(parse_config(GUEST.encode(), "x.yaml")) is None
    assert str(data_root(parse_config(f"{GUEST}data: {{root: /d}}".encode(), "x.yaml"))) == "/d"
