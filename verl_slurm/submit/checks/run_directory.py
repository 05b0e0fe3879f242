"""Checks the run directory before anything is queued: whether it is ours and stays so, whether a group reaches it,
and whether its file system has room for all that the run keeps. Makes nothing.

No room for a single checkpoint is refused; room for one, but not for all, is a warning. Quotas are not seen
(`checkpoint/decide/storage.py`).
"""

import errno
import grp
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from verl_slurm.base.errors import ConfigError, NoRoom, PermissionRefused
from verl_slurm.base.files import no_directory, require_safe_way, unsafe_on_the_way
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.tree import files_below
from verl_slurm.checkpoint.decide.storage import Need, Room, need_of_next
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checkpoint.store.frozen import frozen_digests
from verl_slurm.checkpoint.store.medium import room_for
from verl_slurm.checks import Finding, good, warn
from verl_slurm.config.load import left_of_run, no_run
from verl_slurm.config.reward_spec import parse_reward
from verl_slurm.config.roles import data_root, trained_roles
from verl_slurm.config.schema import BUILTIN, RunConfig
from verl_slurm.dataset.prompts.choice import reaches
from verl_slurm.submit.checks.model_files import num_parameters
from verl_slurm.submit.undoing import only_submitter
from verl_slurm.verl.overrides import user_settings
from verl_slurm.verl.verl_inputs import bytes_per_parameter, data_of, inputs_of, said_settings

_FILES_PER_RANK = 8
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# Tensors per trained parameter: the parameter and AdamW's two moments, all in the dtype of the model.
_PER_PARAMETER = 3
_LEAST_KEPT = 2
# Bytes that a file may take beyond its content.
_BLOCK_BYTES = 4096


def check_run_dir(run_dir: Path) -> None:
    """Checks that the run directory is ours and writable, or can be made (PermissionRefused)."""
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
    if run_dir.is_symlink():
        raise no_directory(NotADirectoryError(errno.ENOTDIR, ""), run_dir)
    if not place.is_dir():
        raise PermissionRefused("a file is in the way of the run directory", where=place, remedy=remedy)
    # By default access(2) asks for the real user, and files are made by the effective one.
    if not os.access(place, os.W_OK | os.X_OK, effective_ids=True) or _is_read_only(place):
        closed = os.statvfs(place).f_flag & os.ST_RDONLY
        if (run_dir / "run.yaml").exists() and (closed or run_dir.stat().st_uid == os.geteuid()):
            remedy = "the run goes on here once that is over; a job that it has waits for that by itself"
        else:
            remedy += ", or ask for write permission"
        raise PermissionRefused(
            "the run directory cannot be written",
            where=run_dir,
            found=f"{'a read-only file system' if closed else 'no write permission'} in {place}",
            remedy=remedy,
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
        if stray and left_of_run(run_dir):
            raise no_run(run_dir / "run.yaml")
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


def check_surroundings(config: RunConfig) -> list[Finding]:
    """Checks whether other users may rename directories around the run's. PermissionRefused: they could exchange the
    second copies, or everybody could replace this run by one of theirs.
    """
    if config.checkpoint.local_dir is not None:
        # A manifest without a key does not say which run it belongs to, so an exchanged second copy would be resumed.
        # The nodes check it again, since this machine may not have it.
        require_safe_way(Path(config.checkpoint.local_dir), "checkpoint.local_dir")
    # From the parent up: whoever may write there can rename the run, whatever its own mode is.
    if (found := unsafe_on_the_way(Path(config.run_dir).parent)) is None:
        return []
    folder, what = found
    # What everybody may write is refused and not noted: the job would run whatever lies there when it starts.
    if folder.stat().st_mode & stat.S_IWOTH:
        require_safe_way(Path(config.run_dir).parent, "run_dir")
    # A group's directory is an ordinary place for runs: its members can take the run away, and are trusted not to.
    said = f"others can rename the run, or put another one in its place ({folder}: {what})"
    return [warn("run_dir", said, "the sticky bit prevents it (chmod +t)")]


def refuse_below_inputs(config: RunConfig) -> None:
    """Refuses a run (paths absolute) that writes below what it is held to, and so would find that changed at its next
    start. ConfigError: with the key.
    """
    written: dict[str, str | None] = {
        "run_dir": config.run_dir,
        "checkpoint.local_dir": config.checkpoint.local_dir,
        "observability.targets_dir": config.observability.targets_dir,
        **{f"tiers: {tier.name}.path": tier.path for tier in config.tiers},
    }
    for read, folder, pattern in _fingerprinted(config):
        for key, place in written.items():
            inside = os.path.relpath(os.path.realpath(place), os.path.realpath(folder)) if place else ".."
            # The files that a glob takes count alone, wherever else the run writes.
            if inside.split("/")[0] == ".." or (pattern is not None and not reaches(pattern, inside)):
                continue
            files_key = read.replace("root", "files")
            way = f", or name the files alone, e.g. {files_key}='*.jsonl'" if read.endswith("root") else ""
            raise ConfigError(
                "the run would write below what each start compares with the first one",
                where=f"{key}={place}",
                found=f"a place within {read}={folder}{f', {files_key}={pattern}' if pattern else ''}",
                expected="a place outside",
                remedy=f"set another {key.partition(':')[0]} or {read}{'' if config.trainer.is_guest else way}",
            )


def _fingerprinted(config: RunConfig) -> Iterator[tuple[str, str, str | None]]:
    """Yields the directories, each with its key and the glob of the files that count, if there is one."""
    data, model, reward = config.data, config.model, parse_reward(config.model.reward)
    root = data_root(config)
    places = data_of(config) if root is None else None
    yield from (("verl.data", place, None) for place in (places if isinstance(places, tuple) else ()))
    found: list[tuple[str, str, str | None]] = [("data.root", str(root or ""), None)]
    if not config.trainer.is_guest:
        scored = reward.name if reward is not None and reward.kind == "classifier" else ""
        found = [
            ("data.root", data.root, data.files),
            ("data.eval_root", data.eval_root or "", data.eval_files),
            ("model.path", model.path, None),
            ("model.reward", scored, None),
        ]
    yield from (one for one in found if one[1] and not one[1].startswith(BUILTIN))


def _is_read_only(place: Path) -> bool:
    flags = os.statvfs(place).f_flag
    # Root passes every access check, but a read-only or kernel file system still takes no directory.
    return bool(flags & os.ST_RDONLY) or place.is_relative_to("/proc") or place.is_relative_to("/sys")


def group_id(config: RunConfig) -> int | None:
    """Returns the number of the run's group; None: it has none. ConfigError: there is no such group of the user's."""
    if config.group is None:
        return None
    mine = {os.getegid(), *os.getgroups()}
    try:
        gid = grp.getgrnam(config.group).gr_gid
    except KeyError:
        gid = None
    # Root may give a file to any group; Linux refuses it to others.
    if gid is not None and (gid in mine or os.geteuid() == 0):
        return gid
    raise ConfigError(
        "no such group" if gid is None else "you are no member of the group",
        where="group",
        found=config.group,
        expected=f"one of {', '.join(_names(mine))}",
        remedy="choose one of yours (see `id`), or leave the key out",
    )


def check_group(config: RunConfig) -> list[Finding]:
    """Checks the group, and whether a directory on the way keeps its members out.

    Raises:
        ConfigError: `group_id`; or the configuration, which the members can read, has a secret.
    """
    gid = group_id(config)
    if gid is None:
        return []
    # The address of most webhooks is all that it takes to post there. Other secrets are files, or refused.
    if config.hooks.webhook is not None and config.hooks.webhook_token_file is None:
        raise ConfigError(
            "the members of the group would read the webhook's address in run.yaml",
            where="hooks.webhook",
            found=f"group: {config.group}, and no hooks.webhook_token_file that the address needs besides",
            expected="an address that is no secret by itself, or no group",
            remedy="leave out one of them, or have a program in hooks.on_end and the like read the address from a file",
        )
    fit = good(f"group {config.group}")
    for folder in reversed(Path(config.run_dir).parents):
        try:
            info = folder.stat()
        except OSError:
            break  # it will be made, and is looked at when the run goes on
        # The kernel takes the group's bits for its members, and the others' for all else.
        if not info.st_mode & (0o010 if info.st_gid == gid else 0o001):
            mode = f"{folder} has mode {info.st_mode & 0o777:04o}"
            return [fit, warn(f"members of {config.group} will not reach the run: {mode}")]
    return [fit]


def _names(gids: set[int]) -> list[str]:
    found = []
    for gid in sorted(gids):
        try:
            found.append(grp.getgrgid(gid).gr_name)
        except KeyError:
            found.append(str(gid))
    return found


def check_room(
    config: RunConfig,
    checkpoints: Path,
    committed: Sequence[CheckpointInfo],
    *,
    frozen: tuple[int, int] = (0, 0),
    ask: Callable[[Path, Need], Room] = room_for,
) -> str:
    """Compares the free room with the room that will be needed; returns a warning, empty: none.

    Args:
        checkpoints: RUN/checkpoints; need not exist.
        committed: the checkpoints already there, newest first.
        frozen: `frozen_to_come`.

    Raises:
        NoRoom: not even one checkpoint fits.
    """
    if committed and not config.trainer.is_guest and committed[0].step >= config.train.steps:
        return ""  # it is done; nothing more is saved
    size = checkpoint_size(config, committed)
    if size is None:
        if not any(frozen):
            return ""
        # The frozen copies alone are known then: a warning, as nothing says whether a checkpoint fits beside them.
        room = ask(checkpoints, _beside(Need(bytes=0, inodes=0, basis=""), frozen))
        return "" if room.enough is not False else f"little room in {checkpoints}: {room.reason}"
    # The frozen copies are made before the first checkpoint, which then has to fit beside them.
    num_bytes, num_files, basis = size
    room = ask(checkpoints, _beside(need_of_next(num_bytes, num_files, basis=basis), frozen))
    # None, where the file system does not report it, refuses nothing. A run without room for one could train and never
    # save.
    if room.enough is False:
        raise NoRoom(
            "there is no room for a single checkpoint",
            where=checkpoints,
            found=room.reason,
            remedy="free some (verl-slurm prune RUN --dry-run shows what could go), or choose another run_dir",
        )
    # Room for one and not for all is a warning: others may free some, and the size is an estimate until the run has
    # saved.
    count = num_to_come(config, len(committed))
    room = ask(checkpoints, _beside(need_of_next(num_bytes, num_files, copies=count, basis=basis), frozen))
    if room.enough is not False:
        return ""
    checkpoint = config.checkpoint
    besides = [("keep_every", checkpoint.keep_every), ("keep_best", checkpoint.keep_best)]
    for_ever = "".join(f" and {key}={value}" for key, value in besides if value)
    return (
        f"little room in {checkpoints}: {room.reason}; checkpoint.keep_last={checkpoint.keep_last}{for_ever} "
        f"keep so many, and one more while it is written"
    )


def num_to_come(config: RunConfig, present: int) -> int:
    """Returns how many more checkpoints may lie there at once beside `present`: at least one. Pure."""
    checkpoint = config.checkpoint
    # A guest's number of steps is known to the guest alone.
    steps = 0 if config.trainer.is_guest else config.train.steps
    for_ever = steps // checkpoint.keep_every if checkpoint.keep_every else 0
    # One more than is kept: an old one goes when the new one is committed.
    return max(max(checkpoint.keep_last, _LEAST_KEPT) + for_ever + checkpoint.keep_best + 1 - present, 1)


def frozen_to_come(config: RunConfig, paths: RunPaths) -> tuple[int, int]:
    """Returns (bytes, inodes) of the copies that the next start will make of models that do not train.

    A directory that cannot be read counts nothing.
    """
    if not config.checkpoint.store_frozen or config.trainer.is_guest:
        return 0, 0
    kind, _, reward = config.model.reward.partition(":")
    sources = {Path(config.model.path)} if not config.model.path.startswith(BUILTIN) else set()
    sources |= {Path(reward)} if kind == "classifier" else set()
    # By size: to be certain all of a model would have to be read, and the start does that.
    there = {sum(_sizes(paths.frozen / digest)) for digest in frozen_digests(paths)}
    to_come = [sizes for sizes in map(_sizes, sources) if sum(sizes) not in there]
    return sum(map(sum, to_come)), sum(map(len, to_come))


def _sizes(root: Path) -> list[int]:
    """Returns the bytes of each file below a directory."""
    try:
        # Follows links, as the copy does.
        return [info.st_size for info in files_below(root, follow=True).values()]
    except OSError:
        # The start says what is wrong with such a directory.
        return []


def _beside(need: Need, frozen: tuple[int, int]) -> Need:
    num_bytes, num_files = frozen
    if not num_files:
        return need
    size = f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"
    models = f"{size} of models that do not train"
    return Need(
        bytes=need.bytes + num_bytes + num_files * _BLOCK_BYTES,
        inodes=need.inodes + num_files,
        basis=f"{need.basis} and {models}" if need.basis else models,
    )


def checkpoint_size(config: RunConfig, committed: Sequence[CheckpointInfo]) -> tuple[int, int, str] | None:
    """Returns (bytes, files, the source of these figures) for one checkpoint; None: unknown."""
    if committed:
        newest = committed[0]
        return newest.num_bytes, newest.num_files, newest.name
    if config.trainer.is_guest:
        return _of_verl(config) if config.trainer.backend == "verl" else None
    model = config.model.path
    # A built-in model may not be there yet; its checkpoints have a few megabytes.
    parameters = None if model.startswith(BUILTIN) else num_parameters(Path(model))
    if parameters is None:
        return None
    copies = _PER_PARAMETER * len(trained_roles(config.train))
    num_bytes = parameters * _DTYPE_BYTES[config.model.dtype] * copies
    num_files = _FILES_PER_RANK * config.distributed.world_size
    return num_bytes, num_files, f"an estimate, {parameters / 1e6:.3g} million parameters"


def _of_verl(config: RunConfig) -> tuple[int, int, str] | None:
    """Computes the size from the model's files; None also for a model that verl downloads."""
    entry, said = config.trainer.entry, user_settings(config.verl)
    settings = said_settings(said)
    model = next((one.place for one in inputs_of(entry, settings, said) if one.kind == "model"), "")
    place = Path(os.path.expanduser(model))
    parameters = num_parameters(place) if place.is_dir() else None
    if parameters is None:
        return None
    num_bytes = parameters * bytes_per_parameter(entry, settings)
    num_files = _FILES_PER_RANK * config.distributed.world_size
    return num_bytes, num_files, f"an estimate, {parameters / 1e6:.3g} million parameters"
