"""Checks a configuration for values that must go together, beyond their types. Pure."""

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from verl_slurm.base.one_line import counted
from verl_slurm.config.checks import Complaint, Complaints
from verl_slurm.config.checks.options import OWN_OPTIONS, asks_for_gpus, check_extra, check_options
from verl_slurm.config.checks.tiers import check_tiers
from verl_slurm.config.elastic import allowed_nodes
from verl_slurm.config.reward_spec import FORMS, nearest_form, parse_reward
from verl_slurm.config.roles import eval_metrics, step_metrics, trained_roles
from verl_slurm.config.schema import HOOKS, MOST_SERVICES, ContainerConfig, RunConfig, ServiceConfig

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# A name is a part of paths and of #SBATCH lines: no blank, no quote, no leading dash or dot.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
# These words stand in #SBATCH lines: a blank would begin another option.
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:@+*-]{0,127}")
# These become words of Slurm's commands as well (`slurm.commands.PARTITIONS`).
_PARTITIONS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}(?:,[A-Za-z0-9_][A-Za-z0-9_.-]{0,254})*")
_MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/=@:-]{0,127}")


def _is_line(text: str) -> bool:
    return bool(text.strip()) and text.isprintable()


def _is_word(text: str) -> bool:
    # A leading dash would be an option of the program that is started.
    return _is_line(text) and not text.startswith("-")


def _is_absolute(path: str) -> bool:
    return path.startswith("/") and path.isprintable()


def _is_run_dir(text: str) -> bool:
    # A brace that is left would be an unknown placeholder, and would become a part of the directory's name.
    return _is_line(text) and not set(text.replace("{name}", "")) & set("{}")


def _is_pattern(text: str) -> bool:
    # A pattern that leaves the root would name files outside the fingerprint.
    return text.isprintable() and not {"", "..", "."} & set(text.split("/"))


_PLACE = "a path or builtin:NAME"
_SINFO = "`sinfo -s` lists them; the `*` that it shows after the default one is no part of the name"
_GLOB = "a pattern relative to the root, without `..`"
# Keys of a text, the form that it must have, the form in words, and the remedy.
_FORMS: tuple[tuple[str, Callable[[str], object], str, str], ...] = (
    ("name", _NAME.fullmatch, "letters, digits, `.`, `_`, `-`; at most 64", "choose another name"),
    ("run_dir", _is_run_dir, "a path, with {name} at most", "e.g. run_dir: runs/{name}"),
    ("model.path", _is_line, _PLACE, "give a path"),
    ("data.root", _is_line, _PLACE, "give a path"),
    ("data.files", _is_pattern, _GLOB, "e.g. data.files: data/train-*.parquet"),
    ("data.eval_root", _is_line, _PLACE, "give a path, or null"),
    ("data.eval_files", _is_pattern, _GLOB, "e.g. data.eval_files: data/test-*.parquet"),
    ("data.chat_template", _is_line, "auto, none or a path", "e.g. data.chat_template: auto"),
    ("checkpoint.local_dir", _is_absolute, "an absolute path", "e.g. checkpoint.local_dir: /local/nvme"),
    ("slurm.partition", _PARTITIONS.fullmatch, "a partition, or several: a,b", _SINFO),
    ("slurm.account", _WORD.fullmatch, "one word", "see `sinfo` or ask for a valid account"),
    ("slurm.qos", _WORD.fullmatch, "one word", "see `sinfo` or ask for a valid qos"),
    ("slurm.python", _is_word, "the directory of a virtual or conda environment, or conda's name for it",
     "e.g. slurm.python: /home/me/venv"),
    ("slurm.container.python", _is_word, "a program", "e.g. python3"),
    ("slurm.container.workdir", _is_absolute, "an absolute path in the image", "e.g. /workspace"),
    ("observability.token_file", _is_absolute, "an absolute path", "give the whole path"),
    ("observability.targets_dir", _is_absolute, "an absolute path", "give the whole path"),
)  # fmt: skip


def complaints(config: RunConfig) -> list[Complaint]:
    """Returns every complaint about `config`."""
    found = Complaints(config)
    parts: list[Callable[[RunConfig, Complaints], None]]
    parts = [_check_guest, _check_forms, _check_shape, _check_times, _check_cadence, _check_partial_saves]
    parts += [_check_keys, _check_slurm, _check_rank_environment, _check_services, _check_container]
    if not config.trainer.is_guest:
        # A guest's own program has batch sizes, sampling and reward. The order is that of the sections.
        parts[3:3] = [_check_batches, _check_sampling, _check_training, _check_evaluation]
    for part in [*parts, _check_observability, _check_hooks]:
        part(config, found)
    check_tiers(config.tiers, found)
    return found


def _check_forms(config: RunConfig, found: Complaints) -> None:
    for key, is_right, expected, remedy in _FORMS:
        value = found.value(key)
        found.refuse_if(value is not None and not is_right(value), key, expected, remedy)
    reward = config.model.reward
    remedy = nearest_form(reward) or "e.g. model.reward: rule:arithmetic"
    found.refuse_if(parse_reward(reward) is None, "model.reward", FORMS, remedy)


def _check_shape(config: RunConfig, found: Complaints) -> None:
    shape, slurm = config.distributed, config.slurm
    found.refuse_if(
        shape.mixed_precision != "none" and config.model.dtype != "float32",
        "distributed.mixed_precision",
        "float32 parameters, to be mixed with",
        "set model.dtype=float32, or distributed.mixed_precision=none",
        f"{shape.mixed_precision}, and model.dtype={config.model.dtype}",
    )
    uneven = found.refuse_if(
        shape.world_size % shape.nodes,
        "distributed.nodes",
        "the same number of ranks on every node",
        "make dp_size * tp_size * pp_size a multiple of distributed.nodes",
        f"{counted(shape.world_size, 'rank')} on {counted(shape.nodes, 'node')}",
    )
    # Each rank needs a GPU of its own, and `extra` may ask for them in sbatch's other words.
    few, each = slurm.gpus_per_node < shape.ranks_per_node, f"{shape.ranks_per_node}"
    few = few and shape.device == "cuda" and not asks_for_gpus(slurm.extra) and not uneven
    remedy = f"set slurm.gpus_per_node={each}"
    found.refuse_if(few, "slurm.gpus_per_node", f"{each}, one for each rank of a node", remedy)


def _check_times(config: RunConfig, found: Complaints) -> None:
    lead_s, limit_s = config.slurm.signal_lead_s, config.slurm.time_limit_min * 60
    # The warning would leave no time to train.
    expected, remedy = f"less than the time limit of {limit_s} s", "lower it or raise slurm.time_limit_min"
    found.refuse_if(lead_s >= limit_s, "slurm.signal_lead_s", expected, remedy, f"{lead_s} s")
    # The margin is kept free at the end of the warning time: as long as that, it would leave no second for the save.
    margin_s, expected = config.daemon.save_margin_s, f"less than slurm.signal_lead_s={lead_s} s"
    found.refuse_if(margin_s >= lead_s, "daemon.save_margin_s", expected, "lower it", f"{margin_s} s")


def _check_keys(config: RunConfig, found: Complaints) -> None:
    keys, section = config.checkpoint.encryption, "checkpoint.encryption"
    if keys is None:
        return
    # What is there is not shown: a user may have put the key itself there.
    there = "neither" if keys.key_file is None else "both"
    remedy = "e.g. encryption: {key_file: /home/me/run.key}; `verl-slurm init --key FILE` makes one"
    found.refuse_if(
        (keys.key_file is None) == (keys.key_env is None), section, "key_file or key_env", remedy, there
    )
    # Every node reads the key, each from its own working directory.
    relative = any(p is not None and not Path(p).is_absolute() for p in [keys.key_file, *keys.old_key_files])
    remedy, there = "write it out: every node has to find it", "something else"
    found.refuse_if(relative, f"{section}.key_file", "an absolute path", remedy, there)
    wrong = keys.key_env is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]{0,63}", keys.key_env)
    expected, remedy = "the name of a variable, A-Z, 0-9 and _", "e.g. key_env: VERL_SLURM_KEY"
    found.refuse_if(wrong, f"{section}.key_env", expected, remedy, there)


def _check_cadence(config: RunConfig, found: Complaints) -> None:
    checkpoint, refuse_if = config.checkpoint, found.refuse_if
    rows, cadence = checkpoint.intervals, checkpoint.cadence
    # Rows that the cadence does not read would be ignored silently.
    remedy = "set checkpoint.cadence=adaptive, or remove checkpoint.intervals"
    there = f"{cadence}, and intervals that it does not read"
    wrong = rows and cadence != "adaptive"
    refuse_if(wrong, "checkpoint.cadence", "adaptive with checkpoint.intervals", remedy, there)
    wrong = cadence in ("young_daly", "continuous") and checkpoint.min_every_steps > checkpoint.every_steps
    expected = f"at most checkpoint.every_steps={checkpoint.every_steps}"
    refuse_if(wrong, "checkpoint.min_every_steps", expected, "lower it")
    if not rows:
        return
    # A row without an end holds for all later steps, so the rows after it would never count.
    key, ends = "checkpoint.intervals", [row.until_step for row in rows]
    limits = [end for end in ends if end is not None]
    if None in ends[:-1]:
        there = f"row {ends.index(None) + 1} of {len(rows)} without until_step"
        remedy = "only the last row has none"
        refuse_if(True, key, "until_step in every row but the last", remedy, there)
    elif limits and ends[-1] is not None:
        there = f"nothing for the steps after {ends[-1]}"
        remedy = f"add {{every: {rows[-1].every}}} at the end"
        refuse_if(True, key, "a last row without until_step", remedy, there)
    rising = all(before < after for before, after in pairwise(limits))
    there, expected = f"until_step {limits}", "until_step rising from row to row"
    refuse_if(not rising, key, expected, "put them in order", there)


def _check_partial_saves(config: RunConfig, found: Complaints) -> None:
    checkpoint, trained = config.checkpoint, trained_roles(config.train)
    parts, every, whole = checkpoint.components, checkpoint.partial_every_steps, checkpoint.include_optimizer
    key, about, refuse_if = "checkpoint.components", "full saves stay as they are", found.refuse_if
    refuse_if(len(set(parts)) != len(parts), key, "each component once", "remove the second")
    refuse_if(
        parts and not every,
        "checkpoint.partial_every_steps",
        "how often a partial save is made",
        f"set it, or remove checkpoint.components; {about}",
        "0, with components that no save would be limited to",
    )
    there, remedy = "[], with partial_every_steps", f"set it, or checkpoint.partial_every_steps=0; {about}"
    refuse_if(every and not parts, key, "what a partial save holds, e.g. [actor]", remedy, there)
    there, expected = "true, with no components", "components that it goes with"
    refuse_if(whole and not parts, "checkpoint.include_optimizer", expected, f"remove it; {about}", there)
    # GRPO has no critic to save.
    expected = f"what train.algorithm={config.train.algorithm} trains: {', '.join(trained)}"
    refuse_if(set(parts) - set(trained), key, expected, "remove the rest")
    there, remedy = "all of them, and the optimizer", "save fully more often instead: checkpoint.every_steps"
    refuse_if(whole and set(parts) == set(trained), key, "less than a full save", remedy, there)


def _check_batches(config: RunConfig, found: Complaints) -> None:
    train, rollout, refuse_if = config.train, config.rollout, found.refuse_if
    group, eval_files = rollout.samples_per_prompt, config.data.eval_files
    # The pattern would be read by nothing: held-out rows of data.root come by eval_fraction.
    there, remedy = f"{eval_files}, and no data.eval_root", f"set data.eval_root={config.data.root}"
    wrong = eval_files is not None and config.data.eval_root is None
    refuse_if(wrong, "data.eval_files", "the directory where they are", remedy, there)
    refuse_if(
        train.algorithm == "grpo" and group < 2,
        "rollout.samples_per_prompt",
        "2 or more with train.algorithm=grpo: a response is judged by the others to its prompt",
        "e.g. rollout.samples_per_prompt=8",
    )
    refuse_if(
        train.algorithm != "grpo" and train.advantage_scale != "std",
        "train.advantage_scale",
        "std: PPO's advantages are whitened over the batch",
        "remove it, or set train.algorithm=grpo",
        f"{train.advantage_scale}, with train.algorithm={train.algorithm}",
    )
    together = f"a multiple of rollout.samples_per_prompt={group}: a prompt's responses stay together"
    for key in ("rollout.micro_batch_size_per_device", "train.batch_size_per_device"):
        size = found.value(key)
        refuse_if(size % group, key, together, f"e.g. {key}={-(-size // group) * group}")
    refuse_if(
        train.kl_in == "loss" and train.kl_estimator == "k1",
        "train.kl_estimator",
        "k3: the gradient of k1 is zero on average",
        "set train.kl_estimator=auto",
        "k1, with train.kl_in=loss",
    )
    batch, mini, micro = (getattr(train, f"{size}batch_size_per_device") for size in ("", "mini_", "micro_"))
    # Each must divide: positions count whole pieces, and the ledger whole generation micro-batches.
    sampled = ("rollout.micro_batch", batch, rollout.micro_batch_size_per_device)
    for size, whole, part in (sampled, ("train.mini_batch", batch, mini), ("train.micro_batch", mini, micro)):
        key = f"{size}_size_per_device"
        refuse_if(whole % part, key, f"a divisor of {whole}", f"e.g. {key}={_divisor(whole, part)}")
    stages = config.distributed.pp_size
    refuse_if(
        stages > 1 and mini // micro < stages,
        "distributed.pp_size",
        "as many micro-batches as stages, or more: 1F1B keeps them all at work",
        f"e.g. train.micro_batch_size_per_device={max(mini // stages, 1)}",
        f"{stages} stages, and mini-batches of {mini // micro} micro-batches",
    )
    wrong, expected = train.warmup_steps > train.steps, f"at most train.steps={train.steps}"
    refuse_if(wrong, "train.warmup_steps", expected, "lower it")


def _divisor(whole: int, near: int) -> int:
    """Returns a divisor of `whole`, at most `near` and not far below it."""
    # Bounded by 1 << 16: a mistyped size of 16 digits would be counted down from, and the check would hang.
    return next(size for size in range(max(min(near, whole, 1 << 16), 1), 0, -1) if whole % size == 0)


def _check_sampling(config: RunConfig, found: Complaints) -> None:
    key, size = "rollout.tensor_parallel_size", config.rollout.tensor_parallel_size
    if size > 1 and config.rollout.engine != "vllm":
        there = f"{size}, with rollout.engine={config.rollout.engine}"
        expected = "1: every rank samples alone"
        found.refuse_if(True, key, expected, f"set {key}=1", there)
        return
    # The ranks of a group are neighbours by number; across nodes they would wait for the network at each layer.
    each = config.distributed.ranks_per_node
    expected = "a divisor of the ranks of one node: they share each layer's work"
    there = f"{size}, and {counted(each, 'rank')} on a node"
    remedy = f"lower {key}, or raise distributed.dp_size"
    found.refuse_if(each % size, key, expected, remedy, there)


def _check_training(config: RunConfig, found: Complaints) -> None:
    train, refuse_if = config.train, found.refuse_if
    # A key that the schedule does not read is refused: it would be ignored silently.
    key, most = "train.lr_decay_steps", max(train.steps - train.warmup_steps, 1)
    if train.lr_schedule == "wsd":
        expected, remedy = f"1 to {most}, the steps after the warm-up", f"e.g. {key}={max(most // 5, 1)}"
        refuse_if(not 1 <= train.lr_decay_steps <= most, key, expected, remedy)
    else:
        there, remedy = f"{train.lr_decay_steps}, with lr_schedule {train.lr_schedule}", "remove it, or set"
        refuse_if(train.lr_decay_steps, key, "0: only wsd has it", f"{remedy} train.lr_schedule=wsd", there)
    wrong, there = train.lr_schedule == "constant", f"{train.lr_min_ratio}, with a rate that never falls"
    expected, remedy = "0 with lr_schedule constant", "remove it, or set train.lr_schedule"
    refuse_if(wrong and train.lr_min_ratio, "train.lr_min_ratio", expected, remedy, there)


def _check_evaluation(config: RunConfig, found: Complaints) -> None:
    data, train, checkpoint = config.data, config.train, config.checkpoint
    every, fraction, key = train.eval_every_steps, data.eval_fraction, "checkpoint.best_metric"
    # Each of the two says what is held out.
    wrong, there = data.eval_root is not None and fraction, f"{fraction}, with data.eval_root"
    found.refuse_if(wrong, "data.eval_fraction", "one of the two", "remove one", there)
    wrong, there = every and data.eval_root is None and not fraction, f"{every}, with nothing held out"
    expected, remedy = "data.eval_root or data.eval_fraction", "e.g. data.eval_fraction=0.05"
    found.refuse_if(wrong, "train.eval_every_steps", expected, remedy, there)
    metric, of_steps, of_evaluations = checkpoint.best_metric, step_metrics(config), eval_metrics()
    if not checkpoint.keep_best:
        return
    # Accepted, such a name would keep no checkpoint ever, without a word.
    if metric in of_evaluations and not every:
        there = f"{metric}, of evaluations that are never made"
        remedy = "set it, or another checkpoint.best_metric"
        found.refuse_if(True, key, "train.eval_every_steps above 0", remedy, there)
        return
    known = (*of_evaluations, *of_steps) if every else of_steps
    near = difflib.get_close_matches(metric, known, n=1) or ["reward"]
    there, remedy = f"{metric!r}, which no step of this run has", f"e.g. {key}={near[0]}"
    found.refuse_if(metric not in known, key, f"one of {', '.join(known)}", remedy, there)


def _check_slurm(config: RunConfig, found: Complaints) -> None:
    shape, slurm = config.distributed, config.slurm
    # First: for these the reason is another than the spelling.
    check_extra(slurm, found)
    check_options("slurm.extra", slurm.extra, found)
    if shape.min_nodes is not None:
        allowed = list(allowed_nodes(config))
        fitting = ", ".join(map(str, allowed)) or "none"
        expected = f"a number of nodes among which a step can be divided: {fitting}"
        remedy = "choose one of them, or batch sizes that more numbers of ranks divide"
        found.refuse_if(allowed[-1:] != [shape.min_nodes], "distributed.min_nodes", expected, remedy)
    found.refuse_if(
        slurm.spare_nodes and shape.nodes == 1,
        "slurm.spare_nodes",
        "0: the first node runs the batch script, and without it Slurm starts the job again",
        "set slurm.spare_nodes=0, or train on more nodes",
        f"{slurm.spare_nodes}, beside a single node",
    )
    # Their places among the job's nodes are counted, and would move when Slurm takes a lost node from the job.
    apart = [name for name, service in config.services.items() if service.nodes]
    if config.may_lose_nodes and apart:
        key = "slurm.spare_nodes" if slurm.spare_nodes else "distributed.min_nodes"
        there = f"set, and nodes of the services {', '.join(apart)}"
        remedy = f"remove {key}, or set services.{apart[0]}.nodes=0"
        found.refuse_if(True, key, "services beside the ranks", remedy, there)


def _check_rank_environment(config: RunConfig, found: Complaints) -> None:
    slurm, expected = config.slurm, "one of them: an image brings its own Python"
    for name in slurm.modules:
        remedy = "e.g. slurm.modules: [cuda/12.4]"
        found.refuse_if(not _MODULE.fullmatch(name), "slurm.modules", "a module's name", remedy, repr(name))
    for number, command in enumerate(slurm.setup):
        wrong = not command.strip() or "\0" in command
        found.refuse_if(wrong, f"slurm.setup[{number}]", "a command for bash", "remove it")
    both = slurm.python is not None and slurm.container is not None
    there = f"{slurm.python}, with slurm.container"
    remedy = "remove it, and name the image's Python by slurm.container.python"
    found.refuse_if(both, "slurm.python", expected, remedy, there)
    _check_variables("", config.env, config.env_from_files, found)


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
# Slurm's, and the place of a rank in its run: another value would make ranks of one run disagree.
_OF_SLURM_AND_DAEMON = re.compile(
    r"(VERL_SLURM|SLURM|SLURMD|SBATCH|SUBMITIT|PMI|PMI2|PMIX|TORCHELASTIC)_.*"
    r"|RANK|LOCAL_RANK|NODE_RANK|GROUP_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|OMP_NUM_THREADS|MKL_NUM_THREADS|PYTHONSAFEPATH|PYTHONUNBUFFERED|TOKENIZERS_PARALLELISM"
)
_SECRET = re.compile(
    r".*(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIALS?)", re.IGNORECASE
)


def _check_variables(
    place: str, env: Mapping[str, str | int], env_from_files: Mapping[str, str], found: Complaints
) -> None:
    # `place`: a section with a dot behind it; empty: the variables are the ranks'.
    plain, secret, refuse_if = f"{place}env", f"{place}env_from_files", found.refuse_if
    for key, name in [*((plain, name) for name in env), *((secret, name) for name in env_from_files)]:
        there, form = "not a variable's name", "letters, digits and `_`"
        refuse_if(not _VARIABLE.fullmatch(name), f"{key}.{name!r}", form, "e.g. NCCL_DEBUG", there)
        there = "a variable that Slurm or the daemon sets"
        remedy = "set distributed.threads_per_rank" if name.endswith("NUM_THREADS") else "remove it"
        refuse_if(_OF_SLURM_AND_DAEMON.fullmatch(name), f"{key}.{name}", "another variable", remedy, there)
    for name, value in env.items():
        # The value is not shown: who reads the error may not be who may know it.
        expected = "a file with mode 0600 that holds it: run.yaml and checkpoints keep what stands here"
        there = "a value whose name says that it is a secret"
        broken = refuse_if(
            "\0" in str(value), f"{plain}.{name}", "text", "remove it", "a text with a zero byte"
        )
        wrong = not broken and value != "" and _SECRET.fullmatch(name)
        refuse_if(wrong, f"{plain}.{name}", expected, f"{secret}: {{{name}: PATH}}", there)
    for name, path in env_from_files.items():
        remedy, twice = "give the path of a file with mode 0600", "a value, and one in env_from_files"
        refuse_if(not _is_line(path), f"{secret}.{name}", "a path", remedy, repr(path))
        refuse_if(name in env, f"{plain}.{name}", "one of them", "remove one", twice)


# The options that the daemon sets itself; a second value would contradict it.
_OPTIONS_OF_RUNTIMES = {
    "apptainer": "--bind -B --pwd --cwd --env-file --pid -p --containall -C",
    "podman": "--entrypoint --pid --name --detach -d --cgroups",
    "pyxis": "--container-image --container-mounts --container-workdir --ntasks -n --nodes -N",
}


def _check_container(config: RunConfig, found: Complaints) -> None:
    container, refuse_if = config.slurm.container, found.refuse_if
    if container is None:
        return
    _check_image(container, found)
    remedy = "runtimes read those as separators: choose another path"
    for place in container.binds:
        wrong = not _is_absolute(place) or bool(set(place) & set(",:"))
        expected = "an absolute path without `,` and `:`"
        refuse_if(wrong, "slurm.container.binds", expected, remedy, repr(place))
    # The run's directory is mounted, too.
    expected = "a path without `,` and `:` where there is a container"
    refuse_if(set(config.run_dir) & set(",:"), "run_dir", expected, remedy)
    for number, word in enumerate(container.extra_args):
        key, name = f"slurm.container.extra_args[{number}]", word.partition("=")[0]
        # A word without a dash would be taken for the image, or for the command.
        expected, remedy = "an option with its value in one word", "e.g. --fakeroot or --shm-size=8g"
        wrong = not word.startswith("-") or word == "--" or not word.isprintable()
        refuse_if(wrong, key, expected, remedy)
        wrong = name in _OPTIONS_OF_RUNTIMES[container.runtime].split()
        expected = "an option that the daemon does not set itself"
        refuse_if(wrong, key, expected, "remove it, or use the key for it", word)
        wrong = name in ("--env", "-e", "--container-env")
        expected = "no variable: a command line is visible to all users"
        refuse_if(wrong, key, expected, "use env, or env_from_files", name)


def _check_image(container: ContainerConfig, found: Complaints) -> None:
    key, image, digest = "slurm.container.image", container.image, container.digest
    by_digest = _DIGEST.fullmatch(image.rpartition("@")[2])
    if found.refuse_if(not _is_word(image), key, "a path or a name", "e.g. /images/verl-slurm.sif"):
        return
    expected = "a name with its digest: podman runs no file"
    remedy = "`podman load -i FILE`, then NAME@sha256:... as `podman images --digests` shows it"
    found.refuse_if(container.runtime == "podman" and container.is_file, key, expected, remedy, image)
    # A registry may give another image of this name tomorrow, and the run would go on with it.
    expected = "a file, or a name with its digest: NAME@sha256:..."
    remedy = "`skopeo inspect --format {{.Digest}} docker://NAME` tells it"
    wrong = not container.is_file and not by_digest
    found.refuse_if(wrong, key, expected, remedy, image)
    key, wrong = "slurm.container.digest", digest is not None and not _DIGEST.fullmatch(digest)
    if found.refuse_if(wrong, key, "sha256: and 64 hexadecimal digits", "leave it out"):
        return
    expected = "none: the digest of an image that is no file is a part of its name"
    remedy = "write it behind the name: NAME@sha256:..."
    found.refuse_if(digest and not container.is_file, key, expected, remedy, digest or "")


# Ports below it are reserved for root.
_FIRST_FREE_PORT = 1024


def _check_observability(config: RunConfig, found: Complaints) -> None:
    wanted, key = config.observability, "observability.metrics_port"
    wrong = 0 < (wanted.metrics_port or 0) < _FIRST_FREE_PORT
    found.refuse_if(wrong, key, "0 (any free one), or 1024 to 65534", "take e.g. 9464")
    # Any user of a node reaches its ports, and the page tells how far the run is.
    found.refuse_if(
        wanted.metrics_host != "127.0.0.1" and wanted.token_file is None,
        "observability.metrics_host",
        "observability.token_file, so that not everybody reads how the run is doing",
        "umask 077; openssl rand -hex 32 > FILE, on storage that all nodes see",
        f"{wanted.metrics_host}, which the whole network reaches, and no token_file",
    )


def _check_hooks(config: RunConfig, found: Complaints) -> None:
    # An address is not shown: it may hold a secret.
    hooks, key, refuse_if = config.hooks, "hooks.webhook", found.refuse_if
    for hook in HOOKS:
        argv, remedy = getattr(hooks, hook), f"e.g. hooks.{hook}: [/home/me/tell.sh]"
        wrong = argv and (
            not argv[0].strip() or argv[0].startswith("-") or any("\0" in word for word in argv)
        )
        refuse_if(wrong, f"hooks.{hook}", "a program and its arguments", remedy)
    token = hooks.webhook_token_file is not None
    if hooks.webhook is None:
        remedy = "set it, or remove this"
        refuse_if(token, "hooks.webhook_token_file", "hooks.webhook, which it is for", remedy, "a token")
        return
    try:
        parts = urlsplit(hooks.webhook)
        host, _ = parts.hostname, parts.port
    except ValueError:
        parts, host = urlsplit(""), None
    is_url = parts.scheme in ("http", "https") and host and hooks.webhook.isprintable()
    if refuse_if(
        not is_url or " " in hooks.webhook,
        key,
        "an address, https://HOST/...",
        "write it out",
        "something else",
    ):
        return
    there, remedy = "a user or a password in it", "move it to a file of mode 0600"
    wrong = parts.username is not None or parts.password is not None
    if not refuse_if(wrong, key, "hooks.webhook_token_file", remedy, there):
        far = parts.scheme == "http" and token and host not in {"127.0.0.1", "::1", "localhost"}
        refuse_if(far, key, "https", "write https://", "http, and a token that would travel in the clear")


# A part of a log's name and of a variable's.
_SERVICE_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_TAKEN = {
    "token": "token, and VERL_SLURM_SERVICE_TOKEN is theirs together",
    "index": "index, and VERL_SLURM_SERVICE_INDEX is another variable",
}
_OF_SERVICES = {"cpus-per-task": "cpus", "gpus-per-node": "gpus", "nodes": "nodes"}


def _check_services(config: RunConfig, found: Complaints) -> None:
    services = config.services
    expected, number = f"at most {MOST_SERVICES}", str(len(services))
    found.refuse_if(len(services) > MOST_SERVICES, "services", expected, "join some of them", number)
    for name, service in services.items():
        key, form = f"services.{name}", "a small letter, then small letters, digits and `_`; at most 32"
        wrong = not _SERVICE_NAME.fullmatch(name) or name in _TAKEN
        found.refuse_if(wrong, key, form, "choose another name", _TAKEN.get(name, repr(name)))
        _check_service(key, service, found)
        for option in (set(service.slurm) & set(OWN_OPTIONS)) - {"account", "mem", "partition", "qos"}:
            remedy = f"set {key}.{_OF_SERVICES[option]}" if option in _OF_SERVICES else "remove it"
            there = "an option that submit sets itself"
            found.refuse_if(True, f"{key}.slurm.{option}", "another", remedy, there)
        check_options(f"{key}.slurm", service.slurm, found)
        _check_variables(f"{key}.", service.env, service.env_from_files, found)
    _check_room(config, found)


def _check_service(key: str, service: ServiceConfig, found: Complaints) -> None:
    words, refuse_if = service.command, found.refuse_if
    wrong = any("\0" in word for word in words) or not words[0].strip() or words == ("-m",)
    refuse_if(wrong, f"{key}.command", "a program and its arguments", "write it out", str(list(words)))
    wrong = service.probe != "tcp" and not re.fullmatch(r"/[!-~]*", service.probe)
    refuse_if(wrong, f"{key}.probe", "tcp, or a path", f"e.g. {key}.probe: /health", repr(service.probe))
    wrong, port = 0 < service.port < _FIRST_FREE_PORT, str(service.port)
    refuse_if(wrong, f"{key}.port", "0 (any free one), or 1024 to 65535", "take e.g. 8000", port)
    wrong, there = bool(service.slurm) and not service.nodes, "options, and no nodes of its own"
    refuse_if(wrong, f"{key}.slurm", "nodes", f"set {key}.nodes", there)


def _check_room(config: RunConfig, found: Complaints) -> None:
    services, slurm = config.services, config.slurm
    beside = {name: service for name, service in services.items() if not service.nodes}
    ports = Counter(service.port for service in beside.values() if service.port)
    for port, times in ports.items():
        there = f"port {port} twice on one node"
        found.refuse_if(times > 1, "services", "another port for each", "leave one at 0", there)
    for what, most in (("cpus", slurm.cpus_per_node), ("gpus", slurm.gpus_per_node)):
        if what == "gpus" and asks_for_gpus(slurm.extra) and not most:
            continue  # asked for in other words of sbatch's
        on_gpus = what == "gpus" and config.distributed.device != "cpu"
        of_ranks = config.distributed.ranks_per_node if on_gpus else int(what == "cpus")
        taken = sum(getattr(service, what) for service in beside.values())
        limit = f"slurm.{what}_per_node={most}"
        found.refuse_if(
            taken and taken + of_ranks > most,
            f"services: {what} of {', '.join(beside)}",
            f"together at most {limit}",
            f"raise slurm.{what}_per_node, or give them nodes of their own",
            f"{taken}, and {of_ranks} for the ranks",
        )
        for name, service in services.items():
            wanted, key = getattr(service, what), f"services.{name}.{what}"
            wrong = service.nodes and not service.slurm and wanted > most
            remedy = f"raise that, or name the kind of its nodes: services.{name}.slurm: {{partition: ...}}"
            expected = f"at most {limit}, on nodes of the same kind as the ranks'"
            found.refuse_if(wrong, key, expected, remedy, str(wanted))


_NATIVE_SECTIONS = ("model", "rollout", "train")
# Keys that a guest's loop does not read, in sections of which it reads the rest.
_NATIVE_KEYS = {
    "data": "prompt_key answer_key max_prompt_tokens shuffle eval_root eval_fraction",
    "checkpoint": "cadence intervals components include_optimizer partial_every_steps",
    "distributed": "tp_size pp_size mixed_precision recompute",
}
# Our own saver has them: that of `verl_slurm.run`, too.
_NOT_OF_VERL = {"checkpoint": "local_dir encryption"}


def _check_guest(config: RunConfig, found: Complaints) -> None:
    trainer, refuse_if = config.trainer, found.refuse_if
    backend, command = trainer.backend, trainer.command
    with_verl, remedy = f"trainer.backend={backend}", "set it, or remove the section"
    wrong, reads = backend != "verl", "trainer.backend: verl, which reads it"
    refuse_if(wrong and config.verl, "verl", reads, remedy, f"a section, and {with_verl}")
    wrong, reads = wrong and trainer.entry != "ppo", "only trainer.backend: verl reads it"
    refuse_if(wrong, "trainer.entry", reads, "remove it", trainer.entry)
    wrong = backend in ("command", "ray") and not command
    remedy = 'e.g. trainer.command: [train.py, --lr, "1e-4"]'
    refuse_if(wrong, "trainer.command", "what is to run", remedy)
    unread = (backend, trainer.entry) in (("native", "ppo"), ("verl", "sft"))
    reads = "trainer.backend: command, ray, or verl with entry ppo, which read it"
    there = f"{' '.join(command)}, and {with_verl}"
    refuse_if(command and unread, "trainer.command", reads, "set it, or remove it", there)
    if not trainer.is_guest:
        return
    kept, metric = config.checkpoint.keep_best, config.checkpoint.best_metric
    # Accepted, that name would keep no checkpoint ever, without a word.
    there = f"{metric}, with keep_best={kept}, and {with_verl}"
    remedy = "name one, e.g. checkpoint.best_metric=loss"
    wrong = bool(kept) and metric == "eval/reward"
    refuse_if(wrong, "checkpoint.best_metric", "a number that the program logs", remedy, there)
    where = "under `verl:`, in verl's own words" if backend == "verl" else "in your program"
    for name in _NATIVE_SECTIONS:
        key = next((f"{name}.{changed}" for changed in _changed(config, name)), "")
        there = f"a value, and {with_verl}, which does not read `{name}`"
        refuse_if(key, key, "only trainer.backend: native reads it", f"remove it and say it {where}", there)
    for name, keys in _NATIVE_KEYS.items():
        there = f"a value, and {with_verl}, whose checkpoints are the program's own"
        keys = f"{keys} {_NOT_OF_VERL.get(name, '')}" if backend == "verl" else keys
        for key in set(_changed(config, name)) & set(keys.split()):
            refuse_if(True, f"{name}.{key}", "only trainer.backend: native has that", "remove it", there)


def _changed(config: RunConfig, section: str) -> Iterator[str]:
    """Yields the keys that have another value than their default."""
    given: msgspec.Struct = getattr(config, section)
    # A section that was not written has the defaults.
    default: msgspec.Struct = type(given)()
    names: Iterable[str] = given.__struct_fields__
    return (name for name in names if getattr(given, name) != getattr(default, name))
