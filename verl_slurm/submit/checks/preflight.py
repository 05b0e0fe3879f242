"""Checks before anything is made or queued: Slurm answers, the directories are writable, the data exists.

A check here costs a second; the same mistake found by the job costs a wait in the queue.
"""

import asyncio
import os
import shutil
import stat
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec

from verl_slurm.base.errors import (
    CheckpointCorrupt,
    ConfigError,
    NotFound,
    PermissionRefused,
    SchemaMismatch,
    SlurmMissing,
    SlurmRefused,
)
from verl_slurm.base.files import read_private, require_safe_way, unsafe_on_the_way
from verl_slurm.base.keys import load_keys
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.base.paths import CHECKPOINT_NAME, RunPaths
from verl_slurm.checkpoint.format.components import require_same_models
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.config.checks.rollout import check_engine, require_engine
from verl_slurm.config.schema import BUILTIN, HOOKS, RunConfig, SlurmConfig, nodes_of_components
from verl_slurm.slurm.facts import PartitionFacts
from verl_slurm.slurm.slurm_client import SlurmClient
from verl_slurm.submit.checks.model_and_reward import check_names, check_reward
from verl_slurm.submit.checks.model_families import check_model_shape, said_of
from verl_slurm.submit.checks.model_files import check_model, refuse_adapter
from verl_slurm.submit.checks.prompt_data import check_data
from verl_slurm.submit.checks.user_programs import Found, check_executable
from verl_slurm.submit.submission_plan import Cluster
from verl_slurm.submit.undoing import only_submitter
from verl_slurm.wire.http import read_token


def source_note(source: Path) -> str:
    """Returns a warning about a configuration that other users own or may write: it can run anything as its
    submitter. Empty: no warning.
    """
    info = source.stat()
    # A group whose number equals the owner's is taken for the owner alone.
    writable = bool(info.st_mode & 0o002 or (info.st_mode & 0o020 and info.st_gid != info.st_uid))
    # Root and the owner of this very code can run anything as the submitter anyway.
    if info.st_uid in {0, os.geteuid(), os.stat(__file__).st_uid} and not writable:
        return ""
    by = (
        f"others may write (mode {stat.S_IMODE(info.st_mode):04o})" if writable else f"uid {info.st_uid} owns"
    )
    return f"the configuration is {os.path.abspath(source)}, which {by}: it can have programs run as you"


def unexpanded(config: RunConfig) -> list[tuple[str, ConfigError]]:
    """Returns the keys whose path has a `$` as the user wrote it, each with its error: a variable that no shell
    expanded would become a directory's name.
    """
    paths = {
        "run_dir": config.run_dir,
        "model.path": config.model.path,
        "data.root": config.data.root,
        "data.eval_root": config.data.eval_root,
        "observability.token_file": config.observability.token_file,
        "observability.targets_dir": config.observability.targets_dir,
    }
    return [
        (
            key,
            ConfigError(
                "variables in paths are not expanded",
                where=key,
                found=path,
                expected="a path without `$`",
                remedy=f'write it out, or let the shell do it: {key}="$VARIABLE/..." behind the configuration',
            ),
        )
        for key, path in paths.items()
        if path is not None and "$" in path
    ]


def check_keys(config: RunConfig, cluster: Cluster) -> str | None:
    """Checks that the keys exist and can be used; returns a note for the user.

    Raises:
        KeyRefused, PermissionRefused: `keys.load_keys`.
    """
    # Here, where the user sees it: the lead refuses a missing key after the wait in the queue.
    keys = load_keys(config.checkpoint.encryption)
    if keys is None or config.checkpoint.encryption is None:
        return None
    keys.current.derive(b"verl-slurm preflight")  # raises if the package is missing
    if cluster == "slurm" and config.checkpoint.encryption.key_env is not None:
        return (
            "checkpoint.encryption.key_env: sbatch hands the variable to slurmctld, which keeps it with the job "
            "(and in the accounting database with AccountingStoreFlags=job_env); key_file does not travel"
        )
    return None


def check_metrics_port(config: RunConfig) -> str | None:
    """Checks that the port's token exists and is private; returns a note for the user about a port that others reach.

    Raises:
        KeyRefused, PermissionRefused: `wire.http.read_token`.
    """
    wanted = config.observability
    if wanted.metrics_port is None:
        return None
    if wanted.token_file is not None:
        read_token(wanted.token_file)
    if wanted.metrics_host == "127.0.0.1":
        return None
    return (
        f"observability.metrics_host {wanted.metrics_host}: the whole network reaches the metrics of this run; the "
        "token keeps others out, and travels in the clear"
    )


def check_hooks(config: RunConfig) -> Found:
    """Checks that the programs of `hooks` are there and can be started, and the token is private.

    Raises:
        ConfigError, DataError, PermissionRefused: they are not.
    """
    hooks, good, notes = config.hooks, list[str](), list[str]()
    # The lead runs them, outside of an image and of what is set up for the ranks.
    plain = msgspec.structs.replace(config, slurm=SlurmConfig())
    for hook in HOOKS:
        if not (words := getattr(hooks, hook)):
            continue
        if shutil.which(words[0]) is None:
            raise ConfigError(
                "a hook cannot be run",
                where=f"hooks.{hook}",
                found=f"no program {words[0]}",
                remedy="give the path of an executable file (chmod +x), with its arguments as further words",
            )
        found = check_executable(plain, words, f"hooks.{hook}")
        good += [hook] if found.good else []
        notes += found.notes
    if hooks.webhook_token_file is not None:
        try:
            read_private(Path(hooks.webhook_token_file))
        except OSError as error:
            place = f"{hooks.webhook_token_file}: {error.strerror}"
            raise ConfigError(
                "the webhook's token cannot be read", where="hooks.webhook_token_file", found=place
            ) from None
    if hooks.webhook:
        notes.append("not looked at: whether hooks.webhook answers")
    return Found([f"hooks {', '.join(good)}"] if good else [], notes)


def check_resume_from(config: RunConfig) -> None:
    """Checks that the target of `checkpoint.resume_from` exists and has the same algorithm; the lead verifies it.

    Raises:
        NotFound: it is not there.
        ConfigError: it belongs to a run that trains other models.
        DataError: it is an adapter.
    """
    wanted = config.checkpoint.resume_from
    if wanted is None or wanted == "auto":
        return
    named = CHECKPOINT_NAME.fullmatch(wanted)
    # A name means a checkpoint of this run; anything else is a path, of whichever run.
    path = RunPaths(config.run_dir).checkpoints / wanted if named else Path(wanted)
    if not path.is_dir():
        raise NotFound(
            "no such checkpoint to resume from",
            where=path,
            expected="a checkpoint directory, the name of one of this run, auto or null",
            remedy="set checkpoint.resume_from; `verl-slurm list RUN` lists a run's",
        )
    refuse_adapter("checkpoint.resume_from", path)
    # An unreadable manifest is left to the lead, which reports what is wrong with it.
    try:
        manifest = read_manifest(path)
    except FileNotFoundError:
        committed = [info.name for info in list_checkpoints(RunPaths(path)) if info.kind == "committed"]
        raise NotFound(
            "not a checkpoint to resume from",
            where=path,
            found="a run's directory" if committed else "a directory without a manifest",
            expected="the directory of one checkpoint",
            remedy=f"set {shell_word(f'checkpoint.resume_from={path}/checkpoints/{committed[0]}')}"
            if committed
            else "`verl-slurm list RUN` lists those of a run",
        ) from None
    except (CheckpointCorrupt, SchemaMismatch, OSError):
        return
    require_same_models(manifest, config, path)


def check_inputs(
    config: RunConfig, written: str = "", *, begun: bool = False
) -> tuple[list[tuple[str, str]], list[str]]:
    """Checks that model, reward and data exist and are not empty. Paths must be absolute; `builtin:` names must exist.

    Args:
        config: paths absolute.
        written: `model.path` as the user wrote it.
        begun: the run has trained on this data.

    Returns:
        The model, the data and the reward by name; and notes for the user about the data.

    Raises:
        ConfigError: no such built-in; the rollout engine is not installed, or cannot sample from the model; or the
            model cannot be divided as `distributed` says.
        DataError: see `model_files`, `inputs` and `data`.
    """
    # First: `said_of` looks built-ins up by name, and an unknown one has no config.json.
    check_names(config)
    require_engine(config)
    # Built-ins are made after all checks, so there may be no directory yet.
    if not config.model.path.startswith(BUILTIN):
        check_model("model.path", Path(config.model.path), written)
    said = said_of(config.model.path)
    check_engine(config, config.model.path, said)
    check_model_shape(config.distributed, config.model.path, said)
    notes = check_reward(config.model.reward, config)
    taken: list[tuple[str, str]] = [("model", config.model.path)]
    roots = (
        ("data", "data.root", config.data.root),
        ("held out", "data.eval_root", config.data.eval_root),
    )
    for name, key, root in roots:
        if root is None:
            continue
        # Built-in data may not be there yet, and needs no check.
        text, said_of_data = (root, []) if root.startswith(BUILTIN) else check_data(config, key, begun=begun)
        taken.append((name, text))
        notes += said_of_data
    return [*taken, ("reward", config.model.reward)], notes


def check_run_dir(run_dir: Path) -> None:
    """Checks that the run directory is ours and writable, or can be made. Makes nothing.

    Raises:
        PermissionRefused: not writable, not ours, or something else is in the way.
    """
    # The nearest directory that exists decides. lexists, so that a link that leads nowhere counts as being in the way.
    place = run_dir
    while not os.path.lexists(place):
        if place == place.parent:
            break
        place = place.parent
    remedy = "choose another run_dir"
    # Another user's link can be turned at any time, even if it leads to a directory of ours now.
    for link in (part for part in (run_dir, *run_dir.parents) if part.is_symlink()):
        if (owner := link.lstat().st_uid) not in {0, os.geteuid()}:
            raise PermissionRefused(
                "a link of another user's is in the path of the run directory",
                where=link,
                found=f"uid {owner}, to {os.readlink(link)}",
                expected=f"uid {os.geteuid()}",
                remedy=remedy,
            )
    if not place.is_dir():
        raise PermissionRefused("a file is in the way of the run directory", where=place, remedy=remedy)
    # By default access(2) asks for the real user, and files are made by the effective one.
    if not os.access(place, os.W_OK | os.X_OK, effective_ids=True) or _is_read_only(place):
        raise PermissionRefused(
            "the run directory cannot be written",
            where=run_dir,
            found=f"no write permission in {place}",
            remedy=f"{remedy}, or ask for write permission",
        )
    # Asked apart from the permissions: root may write into anybody's directory.
    if place == run_dir and place.stat().st_uid != os.geteuid():
        raise PermissionRefused(
            "the run directory belongs to another user",
            where=run_dir,
            found=f"uid {place.stat().st_uid}",
            expected=f"uid {os.geteuid()}",
            remedy=remedy,
        )
    if place == run_dir and (stray := _stray(run_dir)):
        # Another submit may be making the run at this moment: it holds the lock until its run.yaml is there.
        with only_submitter(RunPaths(run_dir)):
            stray = _stray(run_dir)
        if stray:
            raise PermissionRefused(
                "the run directory holds something that is not a run",
                where=run_dir,
                found=f"{stray} and no run.yaml",
                expected="an empty or a new directory",
                remedy=remedy,
            )


def _stray(run_dir: Path) -> str:
    """Returns a name in a directory that is no run; empty: there is none, or it is a run."""
    return "" if (run_dir / "run.yaml").exists() else next((entry.name for entry in run_dir.iterdir()), "")


def check_surroundings(config: RunConfig) -> str | None:
    """Checks which other users may rename directories around the run's; returns a note for the user about `run_dir`.

    The nodes check `checkpoint.local_dir` again: this machine may not have it.

    Raises:
        PermissionRefused: others could exchange the second copies; a manifest without a key does not say which run it
            belongs to. Or everybody could replace this run by one of theirs.
    """
    if config.checkpoint.local_dir is not None:
        # A manifest without a key does not say which run it belongs to, so an exchanged second copy would be resumed.
        require_safe_way(Path(config.checkpoint.local_dir), "checkpoint.local_dir")
    # From the parent up: whoever may write there can rename the run, whatever its own mode is.
    if (found := unsafe_on_the_way(Path(config.run_dir).parent)) is None:
        return None
    folder, what = found
    # What everybody may write is refused and not noted: the job would run whatever lies there when it starts.
    if folder.stat().st_mode & stat.S_IWOTH:
        require_safe_way(Path(config.run_dir).parent, "run_dir")
    # A group's directory is an ordinary place for runs: its members can take the run away, and are trusted not to.
    return (
        f"run_dir: others can rename the run, or put another one in its place ({folder}: {what}); "
        "the sticky bit prevents it (chmod +t)"
    )


def _is_read_only(place: Path) -> bool:
    """Returns whether the file system refuses writes."""
    flags = os.statvfs(place).f_flag
    # Root passes every access check, but a read-only or kernel file system still takes no directory.
    return bool(flags & os.ST_RDONLY) or place.is_relative_to("/proc") or place.is_relative_to("/sys")


def choose_cluster(wanted: Literal["auto", "slurm", "local"]) -> tuple[Cluster, str]:
    """Returns Slurm if its commands exist, else this machine.

    Returns:
        The cluster, and a note for the user if it was chosen for them.
    """
    if wanted != "auto":
        return wanted, ""
    # The absence of the command alone decides. A Slurm that does not answer must not start the run on a login node.
    if shutil.which("sbatch") is None:
        return "local", "no Slurm here (no sbatch in PATH): the run starts on this machine (--cluster local)"
    return "slurm", ""


class SlurmSays(msgspec.Struct, frozen=True):
    """Slurm's answers to the questions before a job is queued."""

    conf: dict[str, str]
    """`scontrol show config`."""
    partition: PartitionFacts
    """The partition that the job goes to, or the first of several."""
    others: tuple[PartitionFacts, ...] = ()
    notes: tuple[str, ...] = ()
    """For the user."""

    @property
    def partitions(self) -> tuple[PartitionFacts, ...]:
        """Returns all partitions of which Slurm may take one."""
        return (self.partition, *self.others)


def check_slurm(config: RunConfig) -> SlurmSays:
    """Checks that Slurm answers, and that its partition can ever run this job.

    Raises:
        ConfigError: `run_dir` has a character that sbatch changes.
        SlurmMissing: no commands, or no answer.
        SlurmRefused: the partition does not exist, is down, or is too small or too short.
    """
    # Seen on 22.05.8: of all printable characters sbatch's --output changes these alone.
    if found := set("%\\") & set(config.run_dir):
        raise ConfigError(
            "sbatch puts words of its own in place of %u and the like, and takes backslashes out",
            where="run_dir",
            found=config.run_dir,
            expected=f"a path without `{min(found)}`, for Slurm",
            remedy="choose another run_dir",
        )
    # All three: submitit needs sbatch and srun, and the lead starts its agents and requeues by the others.
    for program in ("sbatch", "srun", "scontrol"):
        if shutil.which(program) is None:
            raise SlurmMissing(
                "Slurm's commands are not here",
                where=program,
                remedy="load Slurm's module (e.g. `module load slurm`), or use --cluster local",
            )
    return asyncio.run(_ask(config))


async def _ask(config: RunConfig) -> SlurmSays:
    client = SlurmClient()
    name = config.slurm.partition
    try:
        conf = await client.config()
        # Without a name the job goes to the default one, whose limits count then.
        _require_one_cluster(config, conf.get("ClusterName", ""))
        several = await client.partitions_of(name)
    except SlurmMissing as error:
        raise SlurmMissing(
            "Slurm does not answer",
            found=error.found,
            remedy="see `scontrol ping` and SLURM_CONF; --cluster local runs on this machine",
        ) from None
    except NotFound as error:
        raise SlurmRefused(
            "no default partition" if name is None else "no such partition",
            where=error.where,
            remedy="`sinfo -s` lists them; set slurm.partition to one of them",
        ) from None
    complaints = {facts.name: said for facts in several if (said := partition_complaint(config, facts))}
    told = [f"{partition}: {said}" if len(several) > 1 else said for partition, said in complaints.items()]
    if len(complaints) == len(several):
        raise SlurmRefused(
            "the partition cannot run this job" if len(several) == 1 else "no partition can run this job",
            where=", ".join(complaints),
            found="; ".join(told),
            remedy="`scontrol show partition` says its limits; change the slurm section or take another one",
        )
    # Slurm takes such a job, and starts it in one of the others.
    notes = [f"slurm.partition: the job cannot start in partition {said}" for said in told]
    return SlurmSays(conf, several[0], tuple(several[1:]), tuple(notes))


def _require_one_cluster(config: RunConfig, here: str) -> None:
    """Refuses a job for another cluster than the one that answers: nothing here could see it.

    Raises:
        SlurmRefused: it is for another one.
    """
    wanted = {"slurm.extra.clusters": str(config.slurm.extra.get("clusters") or "")}
    wanted |= {name: os.environ.get(name, "") for name in ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")}
    for where, names in wanted.items():
        if names and here and names != here:
            raise SlurmRefused(
                "the job is for another Slurm cluster than the one that answers here",
                where=where,
                found=names,
                expected=f"{here}, or one cluster that all of Slurm's commands ask",
                remedy=f"remove it; `export SLURM_CLUSTERS={names.partition(',')[0]}` has all of them ask that one",
            )


def partition_complaint(config: RunConfig, facts: PartitionFacts) -> str:
    """Returns why this partition can never run this job; empty: nothing speaks against it. Pure."""
    # Components of a heterogeneous job may go to another partition; sbatch --test-only judges those.
    nodes = nodes_of_components(config.least_nodes, config.services)[0]
    limit_s = config.slurm.time_limit_min * 60
    if facts.state != "UP":
        return f"its state is {facts.state}"
    if nodes > facts.total_nodes:
        return f"{counted(facts.total_nodes, 'node')} in it, {nodes} asked for"
    # Of the partition as a whole: which nodes are alike and free is for `sbatch --test-only` to say.
    cpus = nodes * config.slurm.cpus_per_node
    if cpus > facts.total_cpus:
        return f"{counted(facts.total_cpus, 'CPU')} in it, {nodes} x {config.slurm.cpus_per_node} asked for"
    if facts.max_nodes is not None and nodes > facts.max_nodes:
        return f"at most {counted(facts.max_nodes, 'node')} a job, {nodes} asked for"
    if facts.max_time_s is not None and limit_s > facts.max_time_s:
        return f"at most {facts.max_time_s // 60} min a job, {limit_s // 60} asked for"
    return ""


# Linux, containers whose /proc hides the driver, WSL.
_SIGNS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))


def gpu_note(config: RunConfig, cluster: Cluster, *, signs: Sequence[Path] = _SIGNS) -> str | None:
    """Returns what speaks against `distributed.device: cuda`; None: nothing that is known here.

    Args:
        signs: files of which one exists if there is an NVIDIA driver.

    Raises:
        ConfigError: `--cluster local`, and no driver or a torch without CUDA.
    """
    if config.distributed.device != "cuda":
        return None
    try:
        # From its metadata: the command line does not import torch.
        torch = version("torch") if config.slurm.python is None else ""  # another Python's is not known here
    except PackageNotFoundError:
        torch = ""
    no_driver = not any(sign.exists() for sign in signs)
    # On Slurm the nodes may have another environment than the machine that submits, so there it is a note, and the
    # ranks refuse at their start (trainer.place). For this machine it is certain.
    if cluster == "local" and (torch.endswith("+cpu") or no_driver):
        raise ConfigError(
            "this machine cannot give the ranks a GPU",
            where="distributed.device=cuda",
            found="no NVIDIA driver" if no_driver else f"torch {torch}, built without CUDA",
            remedy="set distributed.device=cpu, or submit where there are GPUs"
            if no_driver
            else "pip install -c constraints/cuda.txt torch, or set distributed.device=cpu",
        )
    if torch.endswith("+cpu"):
        return (
            f"distributed.device=cuda, and torch {torch} of this environment is built without CUDA: "
            "ranks that run in it will refuse; pip install -c constraints/cuda.txt torch"
        )
    return None
