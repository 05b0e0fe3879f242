"""Uploads an object in parts and continues after an interruption, by the parts that the server itself lists.

1. ListMultipartUploads: finds an upload for this very key. (Others are not ours to touch.) Of several, the one begun
  last continues; the others are aborted, since their parts would cost money until then.
2. ListParts of it: a part counts when its number, size and ETag (MD5) are those of our bytes. All others are sent.
3. Each part is sent with its Content-MD5; with `verify: checksum` the returned ETag must be that MD5.
4. The whole must have the digest of the manifest entry, or it is not completed.
5. CompleteMultipartUpload names every part with its ETag. A lost reply is no failure: the caller looks at the object
  itself in the end.

No file of ours holds this state: after a mover dies on one node, another node continues its upload.
"""

import base64
import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import botocore.exceptions

from verl_slurm.base.errors import CheckpointCorrupt, TierError
from verl_slurm.checkpoint.format.specification import FileEntry
from verl_slurm.tiers.backend import Source
from verl_slurm.tiers.tier_digest import ContentCheck

MAX_PARTS = 10_000
"""S3's own limit."""
MIN_PART_BYTES = 8 << 20
"""S3 demands 5 MiB; 8 MiB take a tenth of a second at 100 MB/s, so little is sent twice."""
_ROUND = 1 << 20


def part_size(size: int) -> int:
    """Returns the bytes per part for an object of `size` bytes: the smallest, in whole MiB, with which MAX_PARTS
    suffice. 8 MiB up to 78 GiB, 105 MiB for 1 TiB.
    """
    # From the size alone: the next attempt must cut at the same places to use the parts that are there.
    needed = -(-size // MAX_PARTS)
    return max(MIN_PART_BYTES, -(-needed // _ROUND) * _ROUND)


def require_content(key: str, problem: str) -> None:
    """Refuses to send bytes that differ from their manifest.

    Raises:
        CheckpointCorrupt: there is a problem.
    """
    # With `verify: checksum` no later check would find it.
    if problem:
        raise CheckpointCorrupt("the source is damaged", where=key, found=problem)


class MultipartUpload:
    """Uploads one object, once.

    Args:
        size: bytes per part.
        extra: further arguments of CreateMultipartUpload.
        compare: refuse an ETag that is not the MD5 of what was sent (encrypting servers have other ETags).
    """

    def __init__(
        self,
        client: Any,
        bucket: str,
        key: str,
        source: Source,
        entry: FileEntry,
        size: int,
        extra: dict[str, Any],
        *,
        compare: bool,
    ) -> None:
        self._client, self._where, self._compare = client, {"Bucket": bucket, "Key": key}, compare
        self._source, self._entry, self._size, self._extra = source, entry, size, extra

    def run(self, *, in_flight: int) -> int:
        """Sends what the server lacks and completes the upload; returns the bytes sent.

        Raises:
            CheckpointCorrupt: the source differs from `entry`; nothing was completed.
            TierError: the server reports other bytes than were sent.
            botocore's own: the upload failed; what arrived stays there for the next attempt.
        """
        upload_id, there = self._begin()
        check = ContentCheck(self._entry)
        etags: dict[int, str] = {}
        sent = 0
        waiting: deque[tuple[int, str, int, Future[str]]] = deque()

        def settle() -> int:
            number, md5, length, future = waiting.popleft()
            etag = future.result()
            if self._compare and etag.strip('"') != md5:
                raise TierError(
                    "the server has another part than was sent",
                    where=f"s3://{self._where['Bucket']}/{self._where['Key']} part {number}",
                    found=etag,
                    expected=md5,
                    remedy="where objects are encrypted with KMS an ETag is no MD5; else look at the server",
                )
            etags[number] = etag
            return length

        with ThreadPoolExecutor(max_workers=in_flight, thread_name_prefix="parts") as pool:
            try:
                for number, offset in enumerate(range(0, self._source.size, self._size), start=1):
                    # Parts that are there already are read as well: their MD5 is compared, and the digest is of the
                    # whole.
                    data = self._source.read(offset, min(self._size, self._source.size - offset))
                    require_content(self._where["Key"], check.update(data))
                    # MD5 because S3's ETags are. Against damage on the way it suffices; SHA-256 judges the content.
                    md5 = hashlib.md5(data, usedforsecurity=False)
                    # Counts with this very number, size and MD5; anything else there is sent anew.
                    known = there.get(number)
                    if known is not None and known == (len(data), md5.hexdigest()):
                        etags[number] = f'"{md5.hexdigest()}"'
                        continue
                    # The oldest first, before another part is held in memory.
                    if len(waiting) == in_flight:
                        sent += settle()
                    future = pool.submit(self._send, upload_id, number, data, md5.digest())
                    waiting.append((number, md5.hexdigest(), len(data), future))
                while waiting:
                    sent += settle()
            except BaseException:
                for _, _, _, future in waiting:
                    # Parts that have not begun are not sent; what has arrived serves the next attempt.
                    future.cancel()
                raise
        # Before the completion: until then the object does not exist, so damaged bytes never get a name.
        require_content(self._where["Key"], check.problem())
        self._complete(upload_id, etags)
        return sent

    def _begin(self) -> tuple[str, dict[int, tuple[int, str]]]:
        """Returns the upload to continue, and the parts it has: number to (size, MD5)."""
        found = [
            upload
            for upload in _uploads(self._client, self._where["Bucket"], self._where["Key"])
            # The prefix also matches longer keys.
            if upload["Key"] == self._where["Key"]
        ]
        found.sort(key=lambda upload: upload["Initiated"])
        # The one begun last continues. Parts of the others would cost money until they are aborted.
        for upload in found[:-1]:
            self._client.abort_multipart_upload(**self._where, UploadId=upload["UploadId"])
        for upload in found[-1:]:
            try:
                return upload["UploadId"], self._parts(upload["UploadId"])
            except botocore.exceptions.ClientError as error:
                # Completed or aborted since the listing: a new one is begun.
                if error.response.get("Error", {}).get("Code") != "NoSuchUpload":
                    raise
        created = self._client.create_multipart_upload(**self._where, **self._extra)
        return created["UploadId"], {}

    def _parts(self, upload_id: str) -> dict[int, tuple[int, str]]:
        pages = self._client.pages("list_parts", **self._where, UploadId=upload_id)
        return {
            part["PartNumber"]: (part["Size"], part["ETag"].strip('"'))
            for page in pages
            for part in page.get("Parts", ())
        }

    def _send(self, upload_id: str, number: int, data: bytes, md5: bytes) -> str:
        answer = self._client.upload_part(
            **self._where,
            UploadId=upload_id,
            PartNumber=number,
            Body=data,
            ContentMD5=base64.b64encode(md5).decode("ascii"),
        )
        etag: str = answer["ETag"]
        return etag

    def _complete(self, upload_id: str, etags: dict[int, str]) -> None:
        # S3 wants them in ascending order.
        parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
        try:
            self._client.complete_multipart_upload(
                **self._where, UploadId=upload_id, MultipartUpload={"Parts": parts}
            )
        except botocore.exceptions.ClientError as error:
            # The reply to the first try was lost, and botocore asked again: either there is an object now or there is
            # none, and the caller looks.
            if error.response.get("Error", {}).get("Code") != "NoSuchUpload":
                raise


def abort_uploads(client: Any, bucket: str, prefix: str, keep: tuple[str, ...]) -> int:
    """Abandons the uploads below `prefix`, except below `keep`; returns how many."""
    count = 0
    # Listed whole first: an abort changes what the next page would show.
    for upload in list(_uploads(client, bucket, prefix)):
        if upload["Key"].startswith(keep):
            continue
        client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        count += 1
    return count


def _uploads(client: Any, bucket: str, prefix: str) -> Iterator[dict[str, Any]]:
    pages = client.pages("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
    for page in pages:
        yield from page.get("Uploads", ())
