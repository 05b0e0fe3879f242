"""A stand-in for an S3 server, in this process: what the mover needs of the protocol, and faults on demand.

No real server can be installed everywhere, and none gives a wrong answer when asked. This is no S3: a mover that works
with it need not work with Amazon or Ceph (`make test-s3` asks a real one). But it checks what the usual fakes do not:
Content-MD5, the payload's SHA-256, If-None-Match, that somebody signed.
"""

import hashlib
import http.server
import threading
from base64 import b64encode
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

BUCKET = "bucket"
PAGE = 5
"""Entries in each page of a listing: small, so that every listing has several."""


@dataclass(frozen=True)
class Call:
    """One request. `op` e.g. PutObject, UploadPart; `number` of the part."""

    op: str
    key: str
    number: int
    size: int


@dataclass
class Upload:
    key: str
    metadata: dict[str, str]
    order: int
    parts: dict[int, bytes] = field(default_factory=dict)


@dataclass
class Stored:
    data: bytes
    metadata: dict[str, str]
    etag: str


class StandIn(http.server.ThreadingHTTPServer):
    """Listens on a free port of the loopback from `start` to `stop`.

    Attributes:
        fault: asked about every request; its answer: None; "503"; "denied"; "cut" (no answer, nothing done);
            "lose" (done, but no answer); "flip" (another bit is stored than came); "flip_down" (another bit is
            sent than is stored); "short" (the answer breaks off after 20 KiB); "no_range" (the range is ignored);
            or an answer of its own: status, bytes that it announces, and blocks.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, Upload] = {}
        self.calls: list[Call] = []
        self.fault: Callable[[Call], str | tuple[int, int, Iterable[bytes]] | None] = lambda call: None
        self.lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def start(self) -> "StandIn":
        self._thread.start()
        return self

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that were killed leave broken pipes; nothing of that is for the terminal."""

    def count(self, op: str) -> int:
        return sum(call.op == op for call in self.calls)


class _Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        self.status, self.code = status, code


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits 40 ms for an acknowledgement
    server: StandIn

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def _serve(self) -> None:
        url = urlsplit(self.path)
        self.query = {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()}
        bucket, _, self.key = unquote(url.path).lstrip("/").partition("/")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        op = self._op()
        call = Call(op, self.key, int(self.query.get("partNumber", 0)), len(body))
        with self.server.lock:
            self.server.calls.append(call)
            fault = self.server.fault(call)
            self.fault = fault
            if isinstance(fault, tuple):
                self.send_response(fault[0])
                self.send_header("Content-Length", str(fault[1]))
                self.end_headers()
                for block in fault[2]:
                    self.wfile.write(block)
                return
            if fault == "cut":
                self.close_connection = True
                return
            try:
                if fault == "503":
                    raise _Refused(503, "SlowDown")
                if fault == "denied":
                    raise _Refused(403, "ExpiredToken")
                if "Credential=" not in self.headers.get("Authorization", ""):
                    raise _Refused(403, "AccessDenied")
                if bucket != BUCKET:
                    raise _Refused(404, "NoSuchBucket")
                self._check(body)
                if fault == "flip" and body:
                    body = bytes([body[0] ^ 1]) + body[1:]
                status, headers, answer = getattr(self, "_" + op)(body)
            except _Refused as refused:
                # Prose that must never reach a log of ours.
                status, headers = refused.status, {}
                answer = (
                    f"<Error><Code>{refused.code}</Code><Message>secret prose\n</Message></Error>".encode()
                )
        if fault == "lose":
            self.close_connection = True
            return
        self._answer(op, status, headers, answer)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

    def _answer(self, op: str, status: int, headers: dict[str, str], answer: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault == "flip_down" and answer:
            answer = answer[:-1] + bytes([answer[-1] ^ 1])
        if self.fault == "short":
            answer = answer[: 20 << 10]
            self.close_connection = True
        self.wfile.write(answer)

    def _op(self) -> str:
        q, verb = self.query, self.command
        if not self.key:
            return "ListMultipartUploads" if "uploads" in q else "ListObjectsV2"
        if "uploadId" in q:
            return {
                "PUT": "UploadPart",
                "POST": "CompleteMultipartUpload",
                "GET": "ListParts",
                "DELETE": "AbortMultipartUpload",
            }[verb]
        if verb == "POST":
            return "CreateMultipartUpload"
        return {"GET": "GetObject", "HEAD": "HeadObject", "PUT": "PutObject", "DELETE": "DeleteObject"}[verb]

    def _check(self, body: bytes) -> None:
        md5 = self.headers.get("Content-MD5")
        if md5 is not None and md5 != b64encode(hashlib.md5(body).digest()).decode():
            raise _Refused(400, "BadDigest")
        sha256 = self.headers.get("x-amz-content-sha256", "")
        if len(sha256) == 64 and sha256 != hashlib.sha256(body).hexdigest():
            raise _Refused(400, "XAmzContentSHA256Mismatch")

    def _metadata(self) -> dict[str, str]:
        found = {k.lower(): v for k, v in self.headers.items()}
        return {k: v for k, v in found.items() if k.startswith("x-amz-meta-")}

    # ---- objects

    def _PutObject(self, body: bytes) -> tuple[int, dict[str, str], bytes]:  # noqa: N802
        if self.headers.get("If-None-Match") == "*" and self.key in self.server.objects:
            raise _Refused(412, "PreconditionFailed")
        etag = f'"{hashlib.md5(body).hexdigest()}"'
        self.server.objects[self.key] = Stored(body, self._metadata(), etag)
        return 200, {"ETag": etag}, b""

    def _stored(self) -> Stored:
        stored = self.server.objects.get(self.key)
        if stored is None:
            raise _Refused(404, "NoSuchKey")
        return stored

    def _HeadObject(self, body: bytes) -> tuple[int, dict[str, str], bytes]:  # noqa: N802
        stored = self._stored()
        return 200, {**stored.metadata, "ETag": stored.etag, "Content-Length": str(len(stored.data))}, b""

    def _GetObject(self, body: bytes) -> tuple[int, dict[str, str], bytes]:  # noqa: N802
        stored = self._stored()
        span = self.headers.get("Range")
        if span is None or self.fault == "no_range":
            return 200, {"ETag": stored.etag}, stored.data
        first, _, last = span.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(stored.data)), len(stored.data) - 1)
        if start >= len(stored.data):
            raise _Refused(416, "InvalidRange")
        told = f"bytes {start}-{end}/{len(stored.data)}"
        return 206, {"ETag": stored.etag, "Content-Range": told}, stored.data[start : end + 1]

    def _DeleteObject(self, body: bytes) -> tuple[int, dict[str, str], bytes]:  # noqa: N802
        self.server.objects.pop(self.key, None)
        return 204, {}, b""

    def _ListObjectsV2(self, body: bytes) -> tuple[int, dict[str, str], bytes]:  # noqa: N802
        prefix, after = self.query.get("prefix", ""), self.query.get("continuation-token", "")
        keys = sorted(k for k in self.server.objects if k.startswith(prefix) and k > after)
        items = "".join(
            f"<Contents><Key>{escape(k)}</Key><Size>{len(self.server.objects[k].data)}</Size>"
            f"<ETag>{escape(self.server.objects[k].etag)}</ETag></Contents>"
            for k in keys[:PAGE]
        )
        more = len(keys) > PAGE
        token = f"<NextContinuationToken>{escape(keys[PAGE - 1])}</NextContinuationToken>" if more else ""
        return self._xml(
            "ListBucketResult", items + f"<IsTruncated>{str(more).lower()}</IsTruncated>" + token
        )

    # ---- uploads in parts

    def _CreateMultipartUpload(self, body: bytes) -> tuple[int, dict[str, str], bytes]:  # noqa: N802
        number = len(self.server.calls)
        self.server.uploads[f"upload{number}"] = Upload(self.key, self._metadata(), number)
        return self._xml("InitiateMultipartUploadResult", f"<UploadId>upload{number}</UploadId>")

    def _upload(self) -> Upload:
        upload = self.server.uploads.get(self.query["uploadId"])
        if upload is None or upload.key != self.key:
            raise _Refused(404, "NoSuchUpload")
        return upload

    def _UploadPart(self, body: bytes) -> tuple[int, dict[str, str], bytes]:  # noqa: N802
        self._upload().parts[int(self.query["partNumber"])] = body
        return 200, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, b""

    def _ListParts(self, body: bytes) -> tuple[int, dict[str, str], bytes]:  # noqa: N802
        parts = self._upload().parts
        after = int(self.query.get("part-number-marker", 0))
        numbers = sorted(n for n in parts if n > after)
        items = "".join(
            f"<Part><PartNumber>{n}</PartNumber><Size>{len(parts[n])}</Size>"
            f"<ETag>&quot;{hashlib.md5(parts[n]).hexdigest()}&quot;</ETag></Part>"
            for n in numbers[:PAGE]
        )
        more = len(numbers) > PAGE
        mark = f"<NextPartNumberMarker>{numbers[PAGE - 1]}</NextPartNumberMarker>" if more else ""
        return self._xml("ListPartsResult", items + f"<IsTruncated>{str(more).lower()}</IsTruncated>" + mark)

    def _CompleteMultipartUpload(self, body: bytes) -> tuple[int, dict[str, str], bytes]:  # noqa: N802
        upload = self._upload()
        named = [
            (int(part.findtext("{*}PartNumber") or 0), (part.findtext("{*}ETag") or "").strip('"'))
            for part in ElementTree.fromstring(body)
        ]
        if any(n not in upload.parts or hashlib.md5(upload.parts[n]).hexdigest() != e for n, e in named):
            raise _Refused(400, "InvalidPart")
        data = b"".join(upload.parts[n] for n, _ in named)
        etag = f'"{hashlib.md5(data).hexdigest()}-{len(named)}"'
        self.server.objects[self.key] = Stored(data, upload.metadata, etag)
        del self.server.uploads[self.query["uploadId"]]
        return self._xml("CompleteMultipartUploadResult", f"<ETag>{escape(etag)}</ETag>")

    def _AbortMultipartUpload(self, body: bytes) -> tuple[int, dict[str, str], bytes]:  # noqa: N802
        self._upload()
        del self.server.uploads[self.query["uploadId"]]
        return 204, {}, b""

    def _ListMultipartUploads(self, body: bytes) -> tuple[int, dict[str, str], bytes]:  # noqa: N802
        prefix = self.query.get("prefix", "")
        items = "".join(
            f"<Upload><Key>{escape(u.key)}</Key><UploadId>{name}</UploadId>"
            f"<Initiated>2026-01-01T00:{u.order // 60 % 60:02d}:{u.order % 60:02d}.000Z</Initiated></Upload>"
            for name, u in self.server.uploads.items()
            if u.key.startswith(prefix)
        )
        return self._xml("ListMultipartUploadsResult", items + "<IsTruncated>false</IsTruncated>")

    @staticmethod
    def _xml(name: str, inner: str) -> tuple[int, dict[str, str], bytes]:
        return 200, {"Content-Type": "application/xml"}, f"<{name}>{inner}</{name}>".encode()
