"""Keeps copies in a bucket: Amazon S3, Ceph, MinIO, or another server of the protocol. Imports boto3.

A server's statements about content are not believed. Every request that carries bytes carries their Content-MD5, so the
server refuses bytes that were damaged on the way. After that the object is fetched again and hashed (`verify: reread`).
If the user chose `checksum`, every part's ETag was compared with the MD5 of what was sent.

A large object is uploaded in parts, and goes on after an interruption by the parts that the server itself lists: a part
counts when its number, size and ETag (MD5) are those of our bytes. No file of ours holds this state: after a mover dies
on one node, another node continues its upload.

botocore reads the body of an answer whole, and follows a listing as long as the server announces more. So a bucket's
operator could fill a job's memory: bodies and listings have a limit here, and a time.

Credentials come from the standard chain alone (environment, ~/.aws, container and instance roles). They are in no
config, argument, error or log of ours: errors carry the server's code and the HTTP status, never its prose or headers.
"""

import base64
import hashlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import boto3
import botocore.exceptions
import urllib3.exceptions
from botocore.config import Config

from verl_slurm.base.errors import TierError
from verl_slurm.checkpoint.format.specification import FileEntry
from verl_slurm.checkpoint.store.copies import BLOCK_BYTES, ObjectInfo, Source
from verl_slurm.config.checks.tiers import endpoint_problem
from verl_slurm.config.schema import TierConfig

MAX_PARTS = 10_000
"""S3's own limit."""
MIN_PART_BYTES = 8 << 20
"""S3 demands 5 MiB; 8 MiB take a tenth of a second at 100 MB/s, so little is sent twice."""
PART_STEP_BYTES = 1 << 20
MOST_BODY_BYTES = 8 << 20
"""Bytes of an answer that is no object: a page of 1,000 keys of 1 KiB each, every byte percent-encoded, is 3 MiB."""
MOST_KEYS = 1_000_000
"""Keys of one listing: 4,096 ranks with 6 files each, and 40 checkpoints. About 0.5 GB of memory."""
# Pages of a listing that may bring no key.
_SPARE_PAGES = 100
# Seconds for the body of an answer, in addition to the time for its bytes at this rate; and for a listing.
_CALL_S = 120.0
_BYTES_PER_S, _KEYS_PER_S = 256 << 10, 100
_CONNECT_S, _READ_S = 10, 60
# Attempts of each request: botocore's `standard` mode backs off with jitter for 5xx, 429, time-outs and cut
# connections.
_ATTEMPTS = 5
_PROGRESS_BYTES = 16 << 10
# Parts sent at once; each is held in memory.
_IN_FLIGHT = 4
_ENTRIES = ("Contents", "Parts", "Uploads")
# A HEAD request has no body, so its errors are bare numbers; other requests have the server's words.
_MISSING = {"404", "NoSuchKey", "NotFound"}
_BEYOND = {"InvalidRange", "416"}
_TAKEN = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}
_BROKEN = (
    botocore.exceptions.BotoCoreError,
    botocore.exceptions.HTTPClientError,
    urllib3.exceptions.HTTPError,
    OSError,
)


def part_size(size: int) -> int:
    """Returns the bytes per part: the least whole MiB with which MAX_PARTS suffice; 105 MiB for 1 TiB."""
    # From the size alone: the next attempt must cut at the same places to use the parts that are there.
    needed = -(-size // MAX_PARTS)
    return max(MIN_PART_BYTES, -(-needed // PART_STEP_BYTES) * PART_STEP_BYTES)


class S3Place:
    """Keeps copies in a bucket; `checkpoint.store.copies.CopyPlace` specifies each method."""

    def __init__(
        self,
        tier: TierConfig,
        *,
        attempts: int = _ATTEMPTS,
        read_s: float = _READ_S,
        call_s: float = _CALL_S,
        most_keys: int = MOST_KEYS,
    ) -> None:
        assert tier.bucket is not None, "config.tier_checks"
        self._tier, self._bucket, self._call_s, self._most_keys = tier, tier.bucket, call_s, most_keys
        # Region and profile are looked up here, and may be wrong.
        with self._errors(""):
            self._client: Any = boto3.session.Session().client(
                "s3",
                endpoint_url=tier.endpoint,
                region_name=tier.region,
                config=Config(
                    connect_timeout=_CONNECT_S,
                    read_timeout=read_s,
                    retries={"mode": "standard", "total_max_attempts": attempts},
                    max_pool_connections=_IN_FLIGHT + 2,
                    # A server other than Amazon's need not answer to BUCKET.HOST.
                    s3={"addressing_style": "path" if tier.endpoint else "auto"},
                    signature_version="s3v4",
                    # Many servers do not know the newer CRC trailers; all know Content-MD5.
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                ),
            )
        self._session = self._client._endpoint.http_session
        # A handler that returns a response takes the place of the request's sending.
        self._client.meta.events.register("before-send.s3", self._send)
        # AWS_ENDPOINT_URL and the profile's files name endpoints too.
        problem = endpoint_problem(self._client.meta.endpoint_url, insecure=tier.insecure)
        if problem is not None:
            raise TierError(
                "the endpoint of this tier is refused",
                where=f"tier {tier.name}",
                found=problem,
                expected="https://HOST[:PORT]",
                remedy="set tiers[].endpoint, or correct AWS_ENDPOINT_URL",
            )

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._errors(prefix):
            for item in self._listed("list_objects_v2", Prefix=prefix):
                yield ObjectInfo(key=item["Key"], size=item["Size"], stamp=item["ETag"])

    def stat(self, key: str) -> ObjectInfo | None:
        with self._errors(key):
            try:
                head = self._client.head_object(Bucket=self._bucket, Key=key)
            except botocore.exceptions.ClientError as error:
                if _code(error) in _MISSING:
                    return None
                raise
        # Set when the upload began; the object exists only after every part's ETag had matched.
        told = head.get("Metadata", {}).get("sha256", "none") if self._believes else ""
        return ObjectInfo(key=key, size=head["ContentLength"], stamp=head["ETag"], sha256=told)

    def read(self, key: str, offset: int = 0, size: int | None = None) -> Iterator[bytes]:
        """Resumes an interrupted stream after the last byte, a bounded number of times."""
        end, broken = None if size is None else offset + size, 0
        while end is None or offset < end:
            began = offset
            try:
                for block in self._stream(key, offset, end):
                    offset += len(block)
                    yield block
                return
            except _BROKEN as error:
                # A stream that is cut every few KiB still arrives; one that yields a byte each time is a broken server.
                broken = 0 if offset - began >= _PROGRESS_BYTES else broken + 1
                if broken >= _ATTEMPTS:
                    raise self._failure(key, type(error).__name__) from None

    def _stream(self, key: str, offset: int, end: int | None) -> Iterator[bytes]:
        last = "" if end is None else str(end - 1)
        # Without a range for a whole object: an empty one has no byte that a range could begin at.
        span = {"Range": f"bytes={offset}-{last}"} if offset or last else {}
        with self._errors(key):  # botocore has already retried it in vain
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=key, **span)
            except botocore.exceptions.ClientError as error:
                # Beyond the end nothing is read, as from a file.
                if last and _code(error) in _BEYOND:
                    return
                raise
        # A server that ignores it would send the bytes of another place.
        if offset and not str(answer.get("ContentRange", "")).startswith(f"bytes {offset}-"):
            raise self._failure(key, "another range than was asked for")
        body = answer["Body"]
        try:
            # A server that ignores the end of a range may send any number of bytes.
            while (end is None or offset < end) and (block := body.read(BLOCK_BYTES)):
                block = block if end is None else block[: end - offset]
                offset += len(block)
                yield block
        finally:
            # Closed, not drained: the rest may have any length.
            body.close()

    def put(self, key: str, entry: FileEntry, source: Source) -> int:
        extra: dict[str, Any] = {"Metadata": {"sha256": entry.sha256}}
        if self._tier.storage_class is not None:
            extra["StorageClass"] = self._tier.storage_class
        where = {"Bucket": self._bucket, "Key": key}
        with self._errors(key):
            if entry.size > part_size(entry.size):
                return self._put_parts(where, entry, source, extra)
            data = b"".join(source(0))
            answer = self._client.put_object(**where, Body=data, ContentMD5=_md5_64(data), **extra)
            self._require_etag(key, answer.get("ETag", ""), data)
        return len(data)

    def _put_parts(
        self, where: dict[str, str], entry: FileEntry, source: Source, extra: dict[str, Any]
    ) -> int:
        """Sends what the server lacks and completes the upload; returns the bytes sent."""
        upload_id, there = self._begin(where, extra)
        etags: dict[int, str] = {}
        sent = 0
        waiting: deque[tuple[int, bytes, Future[Any]]] = deque()

        def settle() -> int:
            number, data, future = waiting.popleft()
            etags[number] = future.result()["ETag"]
            self._require_etag(f"{where['Key']} part {number}", etags[number], data)
            return len(data)

        with ThreadPoolExecutor(max_workers=_IN_FLIGHT, thread_name_prefix="parts") as pool:
            try:
                # Parts that are there already are read as well: their MD5 is compared, and the source checks the whole.
                for number, data in enumerate(_cut(source(0), part_size(entry.size)), start=1):
                    # MD5 because S3's ETags are. Against damage on the way it suffices; SHA-256 judges the content.
                    if there.get(number) == (len(data), _md5(data)):
                        etags[number] = f'"{_md5(data)}"'
                        continue
                    # The oldest first, before another part is held in memory.
                    if len(waiting) == _IN_FLIGHT:
                        sent += settle()
                    words: dict[str, Any] = {
                        "UploadId": upload_id,
                        "PartNumber": number,
                        "ContentMD5": _md5_64(data),
                    }
                    future = pool.submit(self._client.upload_part, **where, **words, Body=data)
                    waiting.append((number, data, future))
                while waiting:
                    sent += settle()
            except BaseException:
                for _, _, future in waiting:
                    # Parts that have not begun are not sent; what has arrived serves the next attempt.
                    future.cancel()
                raise
        # S3 wants them in ascending order.
        parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
        try:
            self._client.complete_multipart_upload(
                **where, UploadId=upload_id, MultipartUpload={"Parts": parts}
            )
        except botocore.exceptions.ClientError as error:
            # The reply to the first try was lost, and botocore asked again: either there is an object now or there is
            # none, and the caller looks.
            if _code(error) != "NoSuchUpload":
                raise
        return sent

    def _begin(self, where: dict[str, str], extra: dict[str, Any]) -> tuple[str, dict[int, tuple[int, str]]]:
        """Returns the upload of this very key to continue, and the parts it has: number to (size, MD5)."""
        # The prefix also matches longer keys.
        uploads = self._listed("list_multipart_uploads", Prefix=where["Key"])
        found = sorted((u for u in uploads if u["Key"] == where["Key"]), key=lambda u: u["Initiated"])
        # The one begun last continues. Parts of the others would cost money until they are aborted.
        for upload in found[:-1]:
            self._client.abort_multipart_upload(**where, UploadId=upload["UploadId"])
        for upload in found[-1:]:
            words = {"Key": where["Key"], "UploadId": upload["UploadId"]}
            try:
                parts = {
                    part["PartNumber"]: (part["Size"], part["ETag"].strip('"'))
                    for part in self._listed("list_parts", **words)
                }
                return upload["UploadId"], parts
            except botocore.exceptions.ClientError as error:
                # Completed or aborted since the listing: a new one is begun.
                if _code(error) != "NoSuchUpload":
                    raise
        return self._client.create_multipart_upload(**where, **extra)["UploadId"], {}

    def commit(self, key: str, data: bytes) -> bool:
        words = {"Bucket": self._bucket, "Key": key, "Body": data, "ContentMD5": _md5_64(data)}
        with self._errors(key):
            try:
                # The server decides, in one step, whether the name is free: of two movers one commits.
                self._client.put_object(**words, IfNoneMatch="*")
            except botocore.exceptions.ClientError as error:
                if _code(error) in _TAKEN:
                    return False
                if _code(error) != "NotImplemented":
                    raise
                if self.stat(key) is not None:  # a server from before 2024 knows nothing better
                    return False
                self._client.put_object(**words)
        return True

    def delete(self, key: str) -> None:
        with self._errors(key):
            # Deleting what is not there succeeds in S3, so a removal can be repeated after a death.
            self._client.delete_object(Bucket=self._bucket, Key=key)

    def forget(self, prefix: str, keep: Collection[str] = ()) -> int:
        with self._errors(prefix):
            # Listed whole first: an abort changes what the next page would show.
            uploads = list(self._listed("list_multipart_uploads", Prefix=prefix))
            doomed = [upload for upload in uploads if not upload["Key"].startswith(tuple(keep))]
            for upload in doomed:
                self._client.abort_multipart_upload(
                    Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                )
        return len(doomed)

    @property
    def _believes(self) -> bool:
        return self._tier.verify == "checksum"

    def _require_etag(self, what: str, etag: str, data: bytes) -> None:
        if self._believes and etag.strip('"') != _md5(data):
            raise TierError(
                "the server's checksum is not that of the bytes sent",
                where=f"tier {self._tier.name}: {what}",
                found=etag,
                expected=_md5(data),
                remedy="where objects are encrypted with KMS an ETag is no MD5: set verify: reread",
            )

    def _listed(self, operation: str, **words: Any) -> Iterator[dict[str, Any]]:
        began, num_pages, num_keys = time.monotonic(), 0, 0
        for page in self._client.get_paginator(operation).paginate(Bucket=self._bucket, **words):
            entries = [entry for kind in _ENTRIES for entry in page.get(kind, ())]
            num_pages, num_keys = num_pages + 1, num_keys + len(entries)
            # A server can also announce one more page without end, each of them empty.
            if num_keys > self._most_keys or num_pages > num_keys + _SPARE_PAGES:
                raise self._refused("a listing does not end", f"{num_pages} pages with {num_keys} keys")
            # Each page may be in time and the listing still never end.
            if time.monotonic() - began > self._call_s + num_keys / _KEYS_PER_S:
                raise self._refused(
                    "a listing is too slow", f"{num_keys} keys in {self._call_s:.0f} s or more"
                )
            yield from entries

    def _send(self, request: Any, **_: Any) -> Any:
        """Replaces botocore's own sending: bounds the body, and reads it here unless it is an object."""
        is_object = request.stream_output
        request.stream_output = True  # otherwise botocore reads it
        response = self._session.send(request)
        # An error's body is no object, whatever was asked for.
        is_object = is_object and response.status_code < 300
        most_bytes = None if is_object else MOST_BODY_BYTES
        response.raw = _BoundedBody(response.raw, self._refused, most_bytes, self._call_s)
        if not is_object:
            try:
                response.content  # noqa: B018 - a property that reads
            except _BROKEN as error:
                raise botocore.exceptions.HTTPClientError(error=error) from error
        return response

    def _refused(self, what: str, found: str) -> TierError:
        remedy = "look at the bucket's operator and tiers[].endpoint"
        return TierError(
            what, where=f"tier {self._tier.name}: s3://{self._bucket}", found=found, remedy=remedy
        )

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except botocore.exceptions.ClientError as error:
            raise self._failure(key, _code(error), error) from None
        except _BROKEN as error:
            # The type alone: the text of some errors contains URLs with signatures, or configuration values.
            raise self._failure(key, type(error).__name__) from None

    def _failure(
        self, key: str, found: str, error: botocore.exceptions.ClientError | None = None
    ) -> TierError:
        status = "" if error is None else error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", "")
        return TierError(
            "the object store failed",
            where=f"tier {self._tier.name}: s3://{self._bucket}/{key}",
            found=f"{found} {status}".strip(),
            remedy=_REMEDIES.get(found, "the next pass goes on where this one ended"),
        )


class _BoundedBody:
    """The body of an answer: at most `most_bytes`, waited for `call_s` plus the time for its bytes."""

    def __init__(
        self, raw: Any, refused: Callable[[str, str], TierError], most_bytes: int | None, call_s: float
    ) -> None:
        # No socket time-out ends a read that gets a byte now and then.
        self._raw, self._refused, self._most_bytes, self._call_s = raw, refused, most_bytes, call_s
        self._num_bytes, self._waited_s = 0, 0.0
        self._error: Exception | None = None

    def read(self, size: int | None = None) -> bytes:
        """Returns at most `size` bytes, gathered while they come; none at the end."""
        if self._error is not None:
            raise self._error
        began, data = time.monotonic(), bytearray()
        # One receipt of the socket after the other: `read` of the response itself would wait for all.
        while len(data) < (size or BLOCK_BYTES):
            try:
                piece: bytes = self._raw.read1((size or BLOCK_BYTES) - len(data))
            except _BROKEN as error:
                if not data:
                    raise
                # What came before counts: `read` of the place goes on after it, instead of asking for it again.
                self._error = error
                break
            data += piece
            self._num_bytes += len(piece)
            waited_s = self._waited_s + time.monotonic() - began
            if self._most_bytes is not None and self._num_bytes > self._most_bytes:
                self.close()
                raise self._refused("an answer is too long", f"over {self._most_bytes} bytes")
            if waited_s > self._call_s + self._num_bytes / _BYTES_PER_S:
                self.close()
                raise self._refused(
                    "the object store is too slow", f"{self._num_bytes} bytes in {waited_s:.0f} s"
                )
            if not piece:
                break
        self._waited_s += time.monotonic() - began
        return bytes(data)

    def stream(self) -> Iterator[bytes]:
        while block := self.read():
            yield block

    def close(self) -> None:
        self._raw.close()


def _cut(blocks: Iterator[bytes], size: int) -> Iterator[bytes]:
    """Yields the same bytes in parts of `size`, the last one shorter."""
    part = bytearray()
    for block in blocks:
        view = memoryview(block)
        while view:
            piece = view[: size - len(part)]
            part += piece
            view = view[len(piece) :]
            if len(part) == size:
                yield bytes(part)
                part.clear()
    if part:
        yield bytes(part)


_REMEDIES = {
    "NoCredentialsError": "give credentials where AWS tools look: environment, ~/.aws or the instance's role",
    "NoSuchBucket": "make the bucket, or correct tiers[].bucket",
    "NoRegionError": "set tiers[].region",
    "InvalidAccessKeyId": "look at the credentials of this environment",
    "SignatureDoesNotMatch": "look at the credentials of this environment",
    "AccessDenied": "allow put, get, list and multipart on this bucket and prefix; delete only where keep_days is set",
    "EndpointConnectionError": "look at tiers[].endpoint and the network of the job's first node",
}


def _code(error: botocore.exceptions.ClientError) -> str:
    """Returns the server's own code, as a word: nothing else of its answer is repeated."""
    code = str(error.response.get("Error", {}).get("Code", "unknown"))
    # The server chooses it, and it stands in our logs.
    return code if code.isascii() and code.replace("-", "").isalnum() and len(code) <= 64 else "unknown"


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _md5_64(data: bytes) -> str:
    return base64.b64encode(bytes.fromhex(_md5(data))).decode("ascii")
