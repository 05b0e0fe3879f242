"""Specifies `RUN/control/lead.json`, 0600: the address of the live lead, and the token that it requires.

The lead writes it; agents, and verl's node process on Ray, read it. It is a file because argv, job comments and
`--export` are public on a cluster.
"""

from typing import Annotated

import msgspec

from verl_slurm.base.errors import UNREADABLE, PermissionRefused, WireError
from verl_slurm.base.files import read_private, write_file
from verl_slurm.base.paths import RunPaths


class LeadAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds the content of the file."""

    attempt: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    restart: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    """The newest restart that agents may join; 0: none yet."""
    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    token: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """64 hexadecimal digits, new in each attempt."""


def write_lead_address(paths: RunPaths, address: LeadAddress) -> None:
    """Publishes the lead's address."""
    write_file(paths.lead_address, msgspec.json.encode(address))


def read_lead_address(paths: RunPaths) -> LeadAddress:
    """Reads the address.

    Raises OSError: no lead is alive. PermissionRefused: the file is open to others. WireError: no lead writes
    such a file.
    """
    data = read_private(paths.lead_address)
    try:
        return msgspec.json.decode(data, type=LeadAddress)
    except UNREADABLE as error:
        raise WireError("the lead's address cannot be read", where=paths.lead_address, found=error) from error


def remove_lead_address(paths: RunPaths, attempt: int) -> None:
    """Removes the file, unless a newer attempt has already written its own."""
    try:
        # Two leads may overlap for a moment: the newer one's address must stay.
        if read_lead_address(paths).attempt == attempt:
            paths.lead_address.unlink()
    except (OSError, WireError, PermissionRefused):
        return
