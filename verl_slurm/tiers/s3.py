"""Implements a tier in a bucket: Amazon S3, Ceph, MinIO, or another server of the protocol. Imports boto3.

A server's statements about content are not believed. Every request that carries bytes carries their Content-MD5, so the
server refuses bytes that were damaged on the way. After that the object is fetched again and hashed (`verify: reread`).
If the user chose `checksum`, every part's ETag was compared with the MD5 of what was sent.

Credentials come from the standard chain alone (environment, ~/.aws, container and instance roles). They are in no
config, argument, error or log of ours: errors carry the server's code and the HTTP status, never its prose or headers.
"""

import base64
import hashlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import botocore.exceptions
from botocore.config import Config

from verl_slurm.base.errors import TierError
from verl_slurm.checkpoint.format.specification import FileEntry
from verl_slurm.config.checks.tiers import endpoint_problem
from verl_slurm.config.schema import TierConfig
from verl_slurm.tiers.backend import ObjectInfo, Source
from verl_slurm.tiers.multipart import MultipartUpload, abort_uploads, part_size, require_content
from verl_slurm.tiers.s3_client import BROKEN, BoundedClient
from verl_slurm.tiers.tier_digest import check_blocks

_BLOCK = 4 << 20
# Below the piece: a read that a reset interrupts gives less than a whole piece.
_PIECE, _PROGRESS = 32 << 10, 16 << 10
_CONNECT_S, _READ_S = 10, 60
_ATTEMPTS = 5
"""Attempts of each request: botocore's `standard` mode backs off with jitter for 5xx, 429, time-outs and cut
connections."""
_IN_FLIGHT = 4
"""Parts sent at once; each is held in memory."""
# A HEAD request has no body, so its errors are bare numbers; other requests have the server's words.
_MISSING = {"404", "NoSuchKey", "NotFound"}
_BEYOND = {"InvalidRange", "416"}
_TAKEN = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}


class S3Backend:
    """Stores objects in a bucket; `backend.Backend` specifies each method.

    Args:
        attempts: of each request; tests lower it, since botocore's pauses are fixed.
        read_s: seconds to wait for a silent server.
        bounds: of `BoundedClient`.
    """

    def __init__(
        self, tier: TierConfig, *, attempts: int = _ATTEMPTS, read_s: float = _READ_S, **bounds: Any
    ) -> None:
        assert tier.bucket is not None, "config.tier_checks"
        self._tier, self._bucket = tier, tier.bucket
        # Region and profile are looked up here, and may be wrong.
        with self._errors(""):
            client = boto3.session.Session().client(
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
        self._client: Any = BoundedClient(client, f"tier {tier.name}: s3://{tier.bucket}", **bounds)
        # AWS_ENDPOINT_URL and the profile's files name endpoints too.
        problem = endpoint_problem(self._client.meta.endpoint_url, insecure=tier.insecure)
        if problem is not None:
            raise TierError(
                "the endpoint of this tier is refused",
                where=f"tier {tier.name}",
                found=problem,
                expected="https://HOST[:PORT]",
                remedy="set tiers[].endpoint, or mend AWS_ENDPOINT_URL",
            )

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._errors(prefix):
            for page in self._client.pages("list_objects_v2", Bucket=self._bucket, Prefix=prefix):
                for item in page.get("Contents", ()):
                    yield ObjectInfo(key=item["Key"], size=item["Size"], stamp=item["ETag"])

    def stat(self, key: str) -> ObjectInfo | None:
        head = self._head(key)
        return None if head is None else ObjectInfo(key=key, size=head["ContentLength"], stamp=head["ETag"])

    def _head(self, key: str) -> dict[str, Any] | None:
        with self._errors(key):
            try:
                head: dict[str, Any] = self._client.head_object(Bucket=self._bucket, Key=key)
            except botocore.exceptions.ClientError as error:
                if _code(error) in _MISSING:
                    return None
                raise
        return head

    def read(self, key: str, offset: int, size: int) -> bytes:
        return b"".join(self._resumed(key, offset, size)) if size else b""

    def blocks(self, key: str) -> Iterator[bytes]:
        return self._resumed(key, 0, None)

    def _resumed(self, key: str, first: int, size: int | None) -> Iterator[bytes]:
        """Resumes an interrupted stream after the last byte, a bounded number of times."""
        offset, broken = first, 0
        while size is None or offset < first + size:
            began = offset
            try:
                for block in self._stream(key, offset, None if size is None else first + size - offset):
                    offset += len(block)
                    yield block
                return
            except BROKEN as error:
                # A stream that is cut every few KiB still arrives; one that yields a byte each time is a broken server.
                broken = 0 if offset - began >= _PROGRESS else broken + 1
                if broken >= _ATTEMPTS:
                    raise self._failure(key, type(error).__name__) from None

    def _stream(self, key: str, offset: int, size: int | None) -> Iterator[bytes]:
        last = "" if size is None else str(offset + size - 1)
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
        self._require_range(key, answer, offset)
        # In small pieces: a reset loses what the current read has received.
        pieces, got, ended = answer["Body"].iter_chunks(_PIECE), 0, False
        try:
            # A server that ignores the end of a range may send any number of bytes.
            while not ended and (size is None or got < size):
                wanted = _BLOCK if size is None else min(_BLOCK, size - got)
                block, broken, ended = self._client.block(pieces, wanted)
                got += len(block)
                if block:
                    yield block if size is None else block[: len(block) - max(got - size, 0)]
                if broken is not None:
                    raise broken
        except TierError:
            raise  # too slow: a thread still reads, and closing would wait for it
        except BaseException:
            answer["Body"].close()
            raise
        answer["Body"].close()

    def _require_range(self, key: str, answer: dict[str, Any], offset: int) -> None:
        """Requires the range that was asked for."""
        # A server that ignores it would send the bytes of another place.
        if offset and not str(answer.get("ContentRange", "")).startswith(f"bytes {offset}-"):
            raise self._failure(key, "another range than was asked for")

    def put(self, key: str, source: Source, entry: FileEntry) -> int:
        extra: dict[str, Any] = {"Metadata": {"sha256": entry.sha256}}
        if self._tier.storage_class is not None:
            extra["StorageClass"] = self._tier.storage_class
        size = part_size(source.size)
        with self._errors(key):
            if source.size > size:
                compare = self._tier.verify == "checksum"
                upload = MultipartUpload(
                    self._client, self._bucket, key, source, entry, size, extra, compare=compare
                )
                return upload.run(in_flight=_IN_FLIGHT)
            data = source.read(0, source.size)
            # Checked as it is sent: with `verify: checksum` no byte is fetched again.
            require_content(key, check_blocks([data], entry))
            answer = self._client.put_object(
                Bucket=self._bucket, Key=key, Body=data, ContentMD5=_md5_64(data), **extra
            )
            self._compare_etag(key, answer.get("ETag", ""), hashlib.md5(data, usedforsecurity=False))
        return len(data)

    def _compare_etag(self, key: str, etag: str, digest: Any) -> None:
        if self._tier.verify == "checksum" and etag.strip('"') != digest.hexdigest():
            raise TierError(
                "the server's checksum is not that of the bytes sent",
                where=f"tier {self._tier.name}: {key}",
                found=etag,
                expected=digest.hexdigest(),
                remedy="where objects are encrypted with KMS an ETag is no MD5: set verify: reread",
            )

    def commit(self, key: str, data: bytes) -> bool:
        def put(**condition: str) -> None:
            self._client.put_object(
                Bucket=self._bucket, Key=key, Body=data, ContentMD5=_md5_64(data), **condition
            )

        with self._errors(key):
            try:
                # The server decides, in one step, whether the name is free: of two movers one commits.
                put(IfNoneMatch="*")
            except botocore.exceptions.ClientError as error:
                if _code(error) in _TAKEN:
                    return False
                if _code(error) != "NotImplemented":
                    raise
                if self.stat(key) is not None:  # a server from before 2024 knows nothing better
                    return False
                put()
        return True

    def holds(self, key: str, entry: FileEntry) -> str:
        head = self._head(key)
        if head is None:
            return "missing"
        if head["ContentLength"] != entry.size:
            return f"size {head['ContentLength']}, expected {entry.size}"
        if self._tier.verify == "checksum":
            # Set when the upload began; the object exists only after every part's ETag had matched.
            told = head.get("Metadata", {}).get("sha256")
            return "" if told == entry.sha256 else f"sha256 {told} in its metadata, expected {entry.sha256}"
        # Fetched and hashed: what the server says about content proves nothing.
        return check_blocks(self.blocks(key), entry)

    def delete(self, key: str) -> None:
        with self._errors(key):
            # Deleting what is not there succeeds in S3, so a removal can be repeated after a death.
            self._client.delete_object(Bucket=self._bucket, Key=key)

    def forget(self, prefix: str, keep: Collection[str] = ()) -> int:
        with self._errors(prefix):
            return abort_uploads(self._client, self._bucket, prefix, tuple(keep))

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except botocore.exceptions.ClientError as error:
            raise self._failure(key, _code(error), error) from None
        except BROKEN as error:
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


_REMEDIES = {
    "NoCredentialsError": "give credentials where AWS tools look: environment, ~/.aws or the instance's role",
    "NoSuchBucket": "make the bucket, or mend tiers[].bucket",
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


def _md5_64(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode("ascii")
