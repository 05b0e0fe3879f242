"""Declares the section `hooks` of the configuration: who is told what happens to a run."""

from typing import Annotated

import msgspec

HOOKS = ("on_checkpoint", "on_requeue", "on_end", "on_failure")
"""The hooks that are commands."""


class HooksConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tells others what happens to a run: commands on the lead's node, and a webhook (docs/observability.md).

    Each command gets the event as one line of JSON on standard input. None of them is waited for while the run trains
    or saves.
    """

    on_checkpoint: tuple[str, ...] = ()
    """A program and its arguments, run when a checkpoint has been read back and is good."""
    on_requeue: tuple[str, ...] = ()
    """Run when Slurm has accepted the requeue. It has 5 s, or until the job ends."""
    on_end: tuple[str, ...] = ()
    """Run when the run has ended for good, whatever its exit code."""
    on_failure: tuple[str, ...] = ()
    """Run when the run has ended for good and neither was done nor was cancelled."""
    webhook: str | None = None
    """An address (https://...) that gets the same events, and each crash and hang, as a POST of JSON. Its field `text`
    is a sentence, as Slack and Mattermost show it."""
    webhook_token_file: str | None = None
    """A file with mode 0600 whose content is sent as `Authorization: Bearer ...`."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0.0, le=600.0)] = 30.0
    """A command or a POST that takes longer is ended."""
