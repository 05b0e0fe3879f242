"""Checks the hooks of a run. Pure."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from verl_slurm.config.checks import Complaint
from verl_slurm.config.hooks import HOOKS, HooksConfig

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
