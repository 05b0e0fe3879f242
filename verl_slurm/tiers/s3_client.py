"""Bounds what a server can make boto3 do: bytes of an answer, pages and keys of a listing, and time.

botocore reads the body of an answer whole, follows a listing as long as the server announces more, and waits as long as
a byte comes now and then. So a bucket's operator could fill a job's memory and delay its start.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import botocore.exceptions
import urllib3.exceptions

from verl_slurm.base.errors import TierError

_T = TypeVar("_T")

MOST_BODY_BYTES = 8 << 20
"""Bytes of an answer that is no object: a page of 1,000 keys of 1 KiB each, every byte percent-encoded, is 3 MiB."""
MOST_KEYS = 1_000_000
"""Keys of one listing: 4,096 ranks with 6 files each, and 40 checkpoints. About 0.5 GB of memory."""
_SPARE_PAGES = 100
"""Pages of a listing that may bring no key."""
_CALL_S = 120.0
"""Seconds for a request with all of botocore's attempts, in addition to the time for its bytes at this rate."""
_BYTES_PER_S = 256 << 10
_KEYS_PER_S = 100
_ENTRIES = ("Contents", "Parts", "Uploads")

BROKEN = (
    botocore.exceptions.BotoCoreError,
    botocore.exceptions.HTTPClientError,
    urllib3.exceptions.HTTPError,
    OSError,
)


class BoundedClient:
    """Wraps boto3's S3 client in these bounds; its methods are the client's own.

    Args:
        where: for errors.
        call_s, most_keys: tests lower them.
    """

    def __init__(
        self, client: Any, where: str, *, call_s: float = _CALL_S, most_keys: int = MOST_KEYS
    ) -> None:
        self._client, self._where, self._call_s, self._most_keys = client, where, call_s, most_keys
        self._session = client._endpoint.http_session
        # A handler that returns a response takes the place of the request's sending.
        client.meta.events.register("before-send.s3", self._send)

    @property
    def meta(self) -> Any:
        return self._client.meta

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        def call(**words: Any) -> Any:
            body = words.get("Body")
            num_bytes = len(body) if isinstance(body, bytes) else 0
            return self._in_time(lambda: method(**words), num_bytes / _BYTES_PER_S)

        return call

    def pages(self, operation: str, **words: Any) -> Iterator[dict[str, Any]]:
        """Yields the pages of a listing."""
        pages = iter(self._client.get_paginator(operation).paginate(**words))
        began = time.monotonic()
        num_pages = num_keys = 0
        while True:
            page: dict[str, Any] | None = self._in_time(lambda: next(pages, None))
            if page is None:
                return
            num_pages += 1
            num_keys += sum(len(page.get(kind, ())) for kind in _ENTRIES)
            # A server can also announce one more page without end, each of them empty.
            if num_keys > self._most_keys or num_pages > num_keys + _SPARE_PAGES:
                raise self._refused(
                    "a listing does not end",
                    f"{num_pages} pages with {num_keys} keys",
                    f"at most {self._most_keys} keys, and few pages without any",
                )
            # Each page may be in time and the listing still never end.
            if time.monotonic() - began > self._call_s + num_keys / _KEYS_PER_S:
                raise self._refused(
                    "a listing is too slow", f"{num_keys} keys in {self._call_s:.0f} s or more"
                )
            yield page

    def block(self, pieces: Iterator[bytes], size: int) -> tuple[bytes, Exception | None, bool]:
        """Joins pieces to at least `size` bytes.

        Returns:
            The bytes, the error that broke the stream, and whether it has ended.
        """

        def collect() -> tuple[bytes, Exception | None, bool]:
            block = bytearray()
            try:
                for piece in pieces:
                    block += piece
                    if len(block) >= size:
                        return bytes(block), None, False
            except BROKEN as error:
                # With what arrived before: `_resumed` goes on behind it, instead of asking for it again.
                return bytes(block), error, True
            return bytes(block), None, True

        return self._in_time(collect, size / _BYTES_PER_S)

    def _in_time(self, call: Callable[[], _T], more_s: float = 0.0) -> _T:
        """Runs `call` on a thread, which is abandoned if it takes too long."""
        # No socket time-out ends a read that gets a byte now and then.
        # A queue of its own for each call: a late answer of an abandoned one reaches nobody.
        answers: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((call(), None))
            except BaseException as error:  # noqa: BLE001 - raised again below
                answers.put((None, error))

        # A daemon thread: one that was abandoned must not keep the process from ending.
        threading.Thread(target=run, daemon=True, name="s3").start()
        limit_s = self._call_s + more_s
        try:
            answer, error = answers.get(timeout=limit_s)
        except queue.Empty:
            raise self._refused("the object store is too slow", f"no answer in {limit_s:.0f} s") from None
        if error is not None:
            raise error
        return answer  # type: ignore[return-value]

    def _send(self, request: Any, **_: Any) -> Any:
        """Replaces botocore's own sending: reads the body here, up to the bound, unless it is an object."""
        is_object = request.stream_output
        request.stream_output = True  # otherwise botocore reads it
        response = self._session.send(request)
        # An error's body is no object, whatever was asked for.
        if not is_object or response.status_code >= 300:
            response.raw = _Capped(response.raw, self._refused)
            try:
                response.content  # noqa: B018 - a property that reads
            except BROKEN as error:
                raise botocore.exceptions.HTTPClientError(error=error) from error
        return response

    def _refused(self, what: str, found: str, expected: str = "") -> TierError:
        remedy = "look at the bucket's operator and tiers[].endpoint"
        return TierError(what, where=self._where, found=found, expected=expected, remedy=remedy)


class _Capped:
    """A body that is read up to MOST_BODY_BYTES."""

    def __init__(self, raw: Any, refused: Callable[[str, str, str], TierError]) -> None:
        self._raw, self._refused = raw, refused

    def stream(self) -> Iterator[bytes]:
        num_bytes = 0
        for data in self._raw.stream():
            num_bytes += len(data)
            if num_bytes > MOST_BODY_BYTES:
                # Closed, not drained: the rest may have any length.
                self._raw.close()
                raise self._refused("an answer is too long", f"over {num_bytes} bytes", f"{MOST_BODY_BYTES}")
            yield data
