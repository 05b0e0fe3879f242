"""Whether `group` is one of the user's, and whether its members would get as far as the run."""

import grp
import os
from pathlib import Path

from verl_slurm.base.errors import ConfigError
from verl_slurm.config.schema import RunConfig


def group_id(config: RunConfig) -> int | None:
    """Returns the number of the run's group; None: it has none.

    Raises:
        ConfigError: there is no such group, or the user is no member of it.
    """
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


def check_group(config: RunConfig) -> tuple[list[str], str]:
    """Returns what was checked, and a note if a directory on the way keeps the group's members out.

    Raises:
        ConfigError: `group_id`; or the configuration, which the members can read, has a secret.
    """
    gid = group_id(config)
    if gid is None:
        return [], ""
    # The address of most webhooks is all that it takes to post there. Other secrets are files, or refused.
    if config.hooks.webhook is not None and config.hooks.webhook_token_file is None:
        raise ConfigError(
            "the members of the group would read the webhook's address in run.yaml",
            where="hooks.webhook",
            found=f"group: {config.group}, and no hooks.webhook_token_file that the address needs besides",
            expected="an address that is no secret by itself, or no group",
            remedy="leave out one of them, or have a program in hooks.on_end and the like read the address from a file",
        )
    for folder in reversed(Path(config.run_dir).parents):
        try:
            info = folder.stat()
        except OSError:
            break  # it will be made, and is looked at when the run goes on
        # The kernel takes the group's bits for its members, and the others' for all else.
        if not info.st_mode & (0o010 if info.st_gid == gid else 0o001):
            return [f"group {config.group}"], (
                f"members of {config.group} will not reach the run: {folder} has mode {info.st_mode & 0o777:04o}"
            )
    return [f"group {config.group}"], ""


def _names(gids: set[int]) -> list[str]:
    found = []
    for gid in sorted(gids):
        try:
            found.append(grp.getgrgid(gid).gr_name)
        except KeyError:
            found.append(str(gid))
    return found
