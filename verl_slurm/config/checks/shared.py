"""Checks a config for values that must go together, beyond their types. Pure."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from verl_slurm.base.one_line import counted
from verl_slurm.config.checks import Complaint
from verl_slurm.config.checks.containers import container_complaints
from verl_slurm.config.checks.options import (
    OWN_OPTIONS as OWN_OPTIONS,
    asks_for_gpus,
    extra_complaints,
    option_complaints,
)
from verl_slurm.config.checks.rank_environment import rank_environment_complaints, variable_complaints
from verl_slurm.config.checks.rollout import rollout_complaints
from verl_slurm.config.checks.tiers import tier_complaints
from verl_slurm.config.checks.train import batch_complaints, data_complaints, train_complaints
from verl_slurm.config.elastic import allowed_nodes
from verl_slurm.config.hooks_section import HOOKS, HooksConfig
from verl_slurm.config.reward_spec import FORMS, nearest_form, parse_reward
from verl_slurm.config.roles import trained_roles
from verl_slurm.config.schema import (
    DistributedConfig,
    ModelConfig,
    ObservabilityConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from verl_slurm.config.services_section import MOST_SERVICES, ServiceConfig

# A name is a part of paths and of #SBATCH lines: no blank, no quote, no leading dash or dot.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
# These words stand in #SBATCH lines: a blank would begin another option.
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:@+*-]{0,127}")
# These become words of Slurm's commands as well (`slurm.commands.PARTITIONS`).
_PARTITIONS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}(?:,[A-Za-z0-9_][A-Za-z0-9_.-]{0,254})*")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")


def complaints(config: RunConfig) -> list[Complaint]:
    """Yields every complaint about `config`, in the order of the sections."""
    parts: list[Callable[[RunConfig], Iterable[Complaint]]]
    parts = [
        guest_complaints,
        _names,
        _shape,
        _times,
        _cadence,
        _partial_saves,
        _keys,
        _slurm,
        rank_environment_complaints,
        service_complaints,
        container_complaints,
    ]
    if not config.trainer.is_guest:
        # A guest's own program has batch sizes, sampling and reward. The order is that of the sections.
        parts[3:3] = [data_complaints, batch_complaints, rollout_complaints, train_complaints]
    found = [complaint for part in parts for complaint in part(config)]
    found += observability_complaints(config.observability)
    found += hook_complaints(config.hooks)
    return [*found, *tier_complaints(config.tiers)]


def _names(config: RunConfig) -> Iterator[Complaint]:
    if not _NAME.fullmatch(config.name):
        yield Complaint(
            "name", repr(config.name), "letters, digits, `.`, `_`, `-`; at most 64", "choose another name"
        )
    # A brace that is left would be an unknown placeholder, and would become a part of the directory's name.
    rest = config.run_dir.replace("{name}", "")
    if not rest.isprintable() or "{" in rest or "}" in rest or not config.run_dir.strip():
        yield Complaint(
            "run_dir", repr(config.run_dir), "a path, with {name} at most", "e.g. run_dir: runs/{name}"
        )
    for key, text in (("model.path", config.model.path), ("data.root", config.data.root)):
        if not text.strip() or not text.isprintable():
            yield Complaint(key, repr(text), "a path or builtin:NAME", "give a path")
    local_dir = config.checkpoint.local_dir
    if local_dir is not None and not (local_dir.startswith("/") and local_dir.isprintable()):
        yield Complaint(
            "checkpoint.local_dir",
            repr(local_dir),
            "an absolute path",
            "e.g. checkpoint.local_dir: /local/nvme",
        )
    reward = config.model.reward
    if parse_reward(reward) is None:
        remedy = nearest_form(reward) or "e.g. model.reward: rule:arithmetic"
        yield Complaint("model.reward", repr(reward), FORMS, remedy)


def _shape(config: RunConfig) -> Iterator[Complaint]:
    shape = config.distributed
    if shape.mixed_precision != "none" and config.model.dtype != "float32":
        yield Complaint(
            "distributed.mixed_precision",
            f"{shape.mixed_precision}, and model.dtype={config.model.dtype}",
            "float32 parameters, to be mixed with",
            "set model.dtype=float32, or distributed.mixed_precision=none",
        )
    if shape.world_size % shape.nodes:
        yield Complaint(
            "distributed.nodes",
            f"{counted(shape.world_size, 'rank')} on {counted(shape.nodes, 'node')}",
            "the same number of ranks on every node",
            "make dp_size * tp_size * pp_size a multiple of distributed.nodes",
        )
    # Each rank needs a GPU of its own, and `extra` may ask for them in sbatch's other words.
    elif (
        shape.device == "cuda"
        and config.slurm.gpus_per_node < shape.ranks_per_node
        and not asks_for_gpus(config.slurm.extra)
    ):
        yield Complaint(
            "slurm.gpus_per_node",
            str(config.slurm.gpus_per_node),
            f"{shape.ranks_per_node}, one for each rank of a node",
            f"set slurm.gpus_per_node={shape.ranks_per_node}",
        )


def _times(config: RunConfig) -> Iterator[Complaint]:
    lead_s, limit_s = config.slurm.signal_lead_s, config.slurm.time_limit_min * 60
    # The warning would leave no time to train.
    if lead_s >= limit_s:
        yield Complaint(
            "slurm.signal_lead_s",
            f"{lead_s} s",
            f"less than the time limit of {limit_s} s",
            "lower slurm.signal_lead_s or raise slurm.time_limit_min",
        )
    # The margin is kept free at the end of the warning time: as long as that, it would leave no second for the save.
    if config.daemon.save_margin_s >= lead_s:
        yield Complaint(
            "daemon.save_margin_s",
            f"{config.daemon.save_margin_s} s",
            f"less than slurm.signal_lead_s={lead_s} s",
            "lower daemon.save_margin_s",
        )


def _keys(config: RunConfig) -> Iterator[Complaint]:
    keys = config.checkpoint.encryption
    if keys is None:
        return
    # The found value is not shown: a user may have put the key itself there.
    if (keys.key_file is None) == (keys.key_env is None):
        yield Complaint(
            "checkpoint.encryption",
            "neither" if keys.key_file is None else "both",
            "key_file or key_env",
            "e.g. encryption: {key_file: /home/me/run.key}; `verl-slurm init --key FILE` makes one",
        )
    # Every node reads the key, each from its own working directory.
    if any(not Path(p).is_absolute() for p in [keys.key_file, *keys.old_key_files] if p is not None):
        yield Complaint(
            "checkpoint.encryption.key_file",
            "something else",
            "an absolute path",
            "write it out: every node has to find it",
        )
    if keys.key_env is not None and not _VARIABLE.fullmatch(keys.key_env):
        yield Complaint(
            "checkpoint.encryption.key_env",
            "something else",
            "the name of a variable, A-Z, 0-9 and _",
            "e.g. key_env: VERL_SLURM_KEY",
        )


def _cadence(config: RunConfig) -> Iterator[Complaint]:
    checkpoint = config.checkpoint
    rows, key = checkpoint.intervals, "checkpoint.intervals"
    # Rows that the cadence does not read would be ignored silently.
    if rows and checkpoint.cadence != "adaptive":
        yield Complaint(
            "checkpoint.cadence",
            f"{checkpoint.cadence}, and intervals that it does not read",
            "adaptive with checkpoint.intervals",
            "set checkpoint.cadence=adaptive, or remove checkpoint.intervals",
        )
    ends = [row.until_step for row in rows]
    # A row without an end holds for all later steps, so the rows behind it would never count.
    if any(end is None for end in ends[:-1]):
        yield Complaint(
            key,
            f"row {ends.index(None) + 1} of {len(rows)} without until_step",
            "until_step in every row but the last",
            "only the last row holds for the rest",
        )
    elif rows and ends[-1] is not None:
        yield Complaint(
            key,
            f"nothing for the steps after {ends[-1]}",
            "a last row without until_step",
            f"add {{every: {rows[-1].every}}} at the end",
        )
    limits = [end for end in ends if end is not None]
    if any(after <= before for before, after in pairwise(limits)):
        yield Complaint(key, f"until_step {limits}", "until_step rising from row to row", "put them in order")
    if (
        checkpoint.cadence in ("young_daly", "continuous")
        and checkpoint.min_every_steps > checkpoint.every_steps
    ):
        yield Complaint(
            "checkpoint.min_every_steps",
            str(checkpoint.min_every_steps),
            f"at most checkpoint.every_steps={checkpoint.every_steps}",
            "lower it",
        )


def _partial_saves(config: RunConfig) -> Iterator[Complaint]:
    checkpoint = config.checkpoint
    parts, every = checkpoint.components, checkpoint.partial_every_steps
    remedy = "full saves stay as they are; see checkpoint.components in the schema"
    if len(set(parts)) != len(parts):
        yield Complaint("checkpoint.components", str(list(parts)), "each component once", "remove the second")
    if parts and not every:
        yield Complaint(
            "checkpoint.partial_every_steps",
            "0, with components that no save would be limited to",
            "how often a partial save is made",
            f"set checkpoint.partial_every_steps, or remove checkpoint.components; {remedy}",
        )
    if every and not parts:
        yield Complaint(
            "checkpoint.components",
            "[], with partial_every_steps",
            "what a partial save holds, e.g. [actor]",
            f"set it, or checkpoint.partial_every_steps=0; {remedy}",
        )
    if checkpoint.include_optimizer and not parts:
        yield Complaint(
            "checkpoint.include_optimizer",
            "true, with no components",
            "components that it goes with",
            f"remove it; {remedy}",
        )
    # GRPO has no critic to save.
    trained = trained_roles(config.train)
    if set(parts) - set(trained):
        yield Complaint(
            "checkpoint.components",
            str(list(parts)),
            f"what train.algorithm={config.train.algorithm} trains: {', '.join(trained)}",
            "remove the rest",
        )
    if checkpoint.include_optimizer and set(parts) == set(trained):
        yield Complaint(
            "checkpoint.components",
            "all of them, and the optimizer",
            "less than a full save",
            "save fully more often instead: checkpoint.every_steps",
        )


def _slurm(config: RunConfig) -> Iterator[Complaint]:
    slurm = config.slurm
    if slurm.partition is not None and not _PARTITIONS.fullmatch(slurm.partition):
        yield Complaint(
            "slurm.partition",
            repr(slurm.partition),
            "a partition, or several: a,b",
            "`sinfo -s` lists them; the `*` that it shows after the default one is no part of the name",
        )
    for key, word in (("account", slurm.account), ("qos", slurm.qos)):
        if word is not None and not _WORD.fullmatch(word):
            yield Complaint(f"slurm.{key}", repr(word), "one word", f"see `sinfo` or ask for a valid {key}")
    # First: for these the reason is another than the spelling.
    yield from extra_complaints(slurm)
    yield from option_complaints("slurm.extra", slurm.extra)
    yield from _elastic(config)
    if slurm.spare_nodes and config.distributed.nodes == 1:
        yield Complaint(
            "slurm.spare_nodes",
            f"{slurm.spare_nodes}, beside a single node",
            "0: the first node runs the batch script, and without it Slurm starts the job again",
            "set slurm.spare_nodes=0, or train on more nodes",
        )
    # Their places among the job's nodes are counted, and would move when Slurm takes a lost node from the job.
    apart = [name for name, service in config.services.items() if service.nodes]
    if config.may_lose_nodes and apart:
        key = "slurm.spare_nodes" if slurm.spare_nodes else "distributed.min_nodes"
        yield Complaint(
            key,
            f"set, and nodes of the services {', '.join(apart)}",
            "services beside the ranks",
            f"remove {key}, or set services.{apart[0]}.nodes=0",
        )


def _elastic(config: RunConfig) -> Iterator[Complaint]:
    shape, key = config.distributed, "distributed.min_nodes"
    if shape.min_nodes is None:
        return
    if not allowed_nodes(config) or allowed_nodes(config)[-1] != shape.min_nodes:
        fitting = ", ".join(map(str, allowed_nodes(config))) or "none"
        yield Complaint(
            key,
            str(shape.min_nodes),
            f"a number of nodes among which a step can be divided: {fitting}",
            "choose one of them, or batch sizes that more numbers of ranks divide",
        )


_FIRST_FREE_PORT = 1024
"""Ports below it are reserved for root."""


def observability_complaints(wanted: ObservabilityConfig) -> Iterator[Complaint]:
    """Yields every complaint about the section."""
    if wanted.metrics_port and wanted.metrics_port < _FIRST_FREE_PORT:
        yield Complaint(
            "observability.metrics_port",
            str(wanted.metrics_port),
            "0 (any free one), or 1024 to 65534",
            "take e.g. 9464",
        )
    # Any user of a node reaches its ports, and the page tells how far the run is.
    if wanted.metrics_host != "127.0.0.1" and wanted.token_file is None:
        yield Complaint(
            "observability.metrics_host",
            f"{wanted.metrics_host}, which the whole network reaches, and no token_file",
            "observability.token_file, that not everybody reads how the run is doing",
            "umask 077; openssl rand -hex 32 > FILE, on storage that all nodes see",
        )
    for key, path in (("token_file", wanted.token_file), ("targets_dir", wanted.targets_dir)):
        if path is not None and not (path.startswith("/") and path.isprintable()):
            yield Complaint(f"observability.{key}", repr(path), "an absolute path", "give the whole path")


_HERE = {"127.0.0.1", "::1", "localhost"}


def hook_complaints(hooks: HooksConfig) -> Iterator[Complaint]:
    """Yields every complaint about the section. An address is not shown: it may hold a secret."""
    for hook in HOOKS:
        argv = getattr(hooks, hook)
        if argv and (not argv[0].strip() or argv[0].startswith("-") or any("\0" in word for word in argv)):
            yield Complaint(
                f"hooks.{hook}",
                repr(list(argv)),
                "a program and its arguments",
                f"e.g. hooks.{hook}: [/home/me/tell.sh]",
            )
    if hooks.webhook is None:
        if hooks.webhook_token_file is not None:
            yield Complaint(
                "hooks.webhook_token_file",
                "a token",
                "hooks.webhook, which it is for",
                "set it, or remove this",
            )
        return
    try:
        parts = urlsplit(hooks.webhook)
        host, _ = parts.hostname, parts.port
    except ValueError:
        parts, host = urlsplit(""), None
    if (
        parts.scheme not in ("http", "https")
        or not host
        or not hooks.webhook.isprintable()
        or " " in hooks.webhook
    ):
        yield Complaint("hooks.webhook", "something else", "an address, https://HOST/...", "write it out")
    elif parts.username is not None or parts.password is not None:
        yield Complaint(
            "hooks.webhook",
            "a user or a password in it",
            "hooks.webhook_token_file",
            "move it to a file of mode 0600",
        )
    elif parts.scheme == "http" and hooks.webhook_token_file is not None and host not in _HERE:
        yield Complaint(
            "hooks.webhook", "http, and a token that would travel in the clear", "https", "write https://"
        )


# A part of a log's name and of a variable's.
_SERVICE_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_TAKEN = {
    "token": "token, and VERL_SLURM_SERVICE_TOKEN is theirs together",
    "index": "index, and VERL_SLURM_SERVICE_INDEX is another variable",
}
_PATH = re.compile(r"/[!-~]*")
_KEYS = {"cpus-per-task": "cpus", "gpus-per-node": "gpus", "nodes": "nodes"}


def service_complaints(config: RunConfig) -> Iterator[Complaint]:
    """Yields every complaint about the section."""
    if len(config.services) > MOST_SERVICES:
        yield Complaint(
            "services", str(len(config.services)), f"at most {MOST_SERVICES}", "join some of them"
        )
    for name, service in config.services.items():
        key = f"services.{name}"
        if not _SERVICE_NAME.fullmatch(name) or name in _TAKEN:
            expected = "a small letter, then small letters, digits and `_`; at most 32"
            yield Complaint(key, _TAKEN.get(name, repr(name)), expected, "choose another name")
        yield from _one(key, service)
        for option in set(service.slurm) & set(OWN_OPTIONS):
            remedy = f"set {key}.{_KEYS[option]}" if option in _KEYS else "remove it"
            if option != "mem":
                yield Complaint(
                    f"{key}.slurm.{option}", "an option that submit sets itself", "another", remedy
                )
        yield from option_complaints(f"{key}.slurm", service.slurm)
        yield from variable_complaints(key, service.env, service.env_from_files)
    yield from _room(config)


def _one(key: str, service: ServiceConfig) -> Iterator[Complaint]:
    words = service.command
    if any("\0" in word for word in words) or not words[0].strip() or words == ("-m",):
        yield Complaint(f"{key}.command", repr(list(words)), "a program and its arguments", "write it out")
    if service.probe != "tcp" and not _PATH.fullmatch(service.probe):
        yield Complaint(f"{key}.probe", repr(service.probe), "tcp, or a path", f"e.g. {key}.probe: /health")
    if 0 < service.port < _FIRST_FREE_PORT:
        yield Complaint(
            f"{key}.port", str(service.port), "0 (any free one), or 1024 to 65535", "take e.g. 8000"
        )
    if service.slurm and not service.nodes:
        yield Complaint(f"{key}.slurm", "options, and no nodes of its own", "nodes", f"set {key}.nodes")


def _room(config: RunConfig) -> Iterator[Complaint]:
    """Checks ports, CPUs and GPUs against what the nodes have."""
    services, slurm = config.services, config.slurm
    beside = {name: service for name, service in services.items() if not service.nodes}
    ports = Counter(service.port for service in beside.values() if service.port)
    for port in (port for port, times in ports.items() if times > 1):
        yield Complaint(
            "services", f"port {port} twice on one node", "another port for each", "leave one at 0"
        )
    for what, there in (("cpus", slurm.cpus_per_node), ("gpus", slurm.gpus_per_node)):
        if what == "gpus" and asks_for_gpus(slurm.extra) and not there:
            continue  # asked for in other words of sbatch's
        of_ranks = 1 if what == "cpus" else 0
        if what == "gpus" and config.distributed.device != "cpu":
            of_ranks = config.distributed.ranks_per_node
        taken = sum(getattr(service, what) for service in beside.values())
        if taken and taken + of_ranks > there:
            yield Complaint(
                f"services: {what} of {', '.join(beside)}",
                f"{taken}, and {of_ranks} for the ranks",
                f"together at most slurm.{what}_per_node={there}",
                f"raise slurm.{what}_per_node, or give them nodes of their own",
            )
        for name, service in services.items():
            if service.nodes and not service.slurm and getattr(service, what) > there:
                yield Complaint(
                    f"services.{name}.{what}",
                    str(getattr(service, what)),
                    f"at most slurm.{what}_per_node={there}, on nodes of the same kind as the ranks'",
                    f"raise that, or name the kind of its nodes: services.{name}.slurm: {{partition: ...}}",
                )


_OURS = {
    "model": ModelConfig(),
    "rollout": RolloutConfig(),
    "train": TrainConfig(),
}
_OURS_OF_DATA = ("prompt_key", "answer_key", "max_prompt_tokens", "shuffle", "eval_root", "eval_fraction")
_OURS_OF_CHECKPOINT = ("cadence", "intervals", "components", "include_optimizer", "partial_every_steps")
_NOT_OF_VERL = ("local_dir", "encryption")
"""Our own saver has them: that of `verl_slurm.run`, too."""
_OURS_OF_DISTRIBUTED = ("tp_size", "pp_size", "mixed_precision", "recompute")


def guest_complaints(config: RunConfig) -> Iterator[Complaint]:
    """Yields every complaint about the guest's loop."""
    trainer = config.trainer
    if trainer.backend != "verl" and config.verl:
        found = f"a section, and trainer.backend={trainer.backend}"
        yield Complaint(
            "verl", found, "trainer.backend: verl, which reads it", "set it, or remove the section"
        )
    if trainer.backend != "verl" and trainer.entry != "ppo":
        yield Complaint("trainer.entry", trainer.entry, "only trainer.backend: verl reads it", "remove it")
    if trainer.backend in ("command", "ray") and not trainer.command:
        yield Complaint(
            "trainer.command", "[]", "what is to run", 'e.g. trainer.command: [train.py, --lr, "1e-4"]'
        )
    if trainer.command and (trainer.backend, trainer.entry) in (("native", "ppo"), ("verl", "sft")):
        found = f"{' '.join(trainer.command)}, and trainer.backend={trainer.backend}"
        reads = "trainer.backend: command, ray, or verl with entry ppo, which read it"
        yield Complaint("trainer.command", found, reads, "set it, or remove it")
    if trainer.is_guest:
        yield from _not_read(config)


def _not_read(config: RunConfig) -> Iterator[Complaint]:
    backend = config.trainer.backend
    where = "under `verl:`, in verl's own words" if backend == "verl" else "in your program"
    # Compared with the defaults: a section that was not written has them.
    for name, default in _OURS.items():
        if getattr(config, name) != default:
            changed = _changed(getattr(config, name), default)
            yield Complaint(
                f"{name}.{changed[0]}",
                f"a value, and trainer.backend={backend}, which does not read `{name}`",
                "only trainer.backend: native reads it",
                f"remove it and say it {where}",
            )
    closed = (
        ("data", config.data, type(config.data)(), _OURS_OF_DATA),
        (
            "checkpoint",
            config.checkpoint,
            type(config.checkpoint)(),
            (*_OURS_OF_CHECKPOINT, *(_NOT_OF_VERL if backend == "verl" else ())),
        ),
        ("distributed", config.distributed, DistributedConfig(), _OURS_OF_DISTRIBUTED),
    )
    for name, section, default, keys in closed:
        # The rest of these sections is read for a guest, too.
        for key in set(_changed(section, default)) & set(keys):
            yield Complaint(
                f"{name}.{key}",
                f"a value, and trainer.backend={backend}, whose checkpoints are the program's own",
                "only trainer.backend: native has that",
                "remove it",
            )


def _changed(section: msgspec.Struct, default: msgspec.Struct) -> list[str]:
    return [name for name in section.__struct_fields__ if getattr(section, name) != getattr(default, name)]
