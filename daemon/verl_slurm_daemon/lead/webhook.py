"""Sends one POST: `python -m verl_slurm_daemon.lead.webhook`, told by standard input what and where.

A process of its own: DNS and TLS block for as long as they like, and their libraries stay out of the daemon's memory.
"""

import sys
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from typing import IO, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import msgspec

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.files import read_private


class Post(NamedTuple):
    """What is sent, and where."""

    url: str
    token_file: str | None
    timeout_s: float
    body: str


class _NoRedirect(HTTPRedirectHandler):
    """A redirect would send the token to whom the first server names."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


def main() -> int:
    """Returns 0 if the server took it; else prints one line, without the address, which may hold a secret."""
    try:
        post = msgspec.json.decode(sys.stdin.buffer.read(), type=Post)
        headers = {"Content-Type": "application/json", "User-Agent": "verl-slurm"}
        if post.token_file is not None:
            headers["Authorization"] = f"Bearer {read_private(Path(post.token_file)).decode().strip()}"
        request = Request(post.url, post.body.encode(), headers, method="POST")  # noqa: S310 - http(s), by the config's check
        problem = _send(request, post.timeout_s)
    except VerlSlurmError as error:
        problem = error.one_line()
    except (OSError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    if not problem:
        return 0
    sys.stderr.write(f"{problem}\n")
    return 1


def _send(request: Request, timeout_s: float) -> str:
    host = urlsplit(request.full_url).hostname
    try:
        with build_opener(_NoRedirect).open(request, timeout=timeout_s):
            return ""
    except HTTPError as error:
        return f"{host} answered {error.code}"
    except URLError as error:
        return f"{host} does not answer: {error.reason}"
    # Of an answer that ends in its middle: urllib wraps the errors of connecting alone.
    except (OSError, HTTPException) as error:
        return f"{host} does not answer: {type(error).__name__}"


if __name__ == "__main__":
    raise SystemExit(main())
