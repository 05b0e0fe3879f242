"""A stand-in for the metadata services of AWS, Google and Azure, in this process.

The real ones answer on machines of these clouds alone, and none announces an end when asked. This one insists on what
they insist on: AWS's token, Google's and Azure's headers. It has nothing else of them.
"""

import http.server
import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import msgspec

MACHINE = "pool_3"


class MetadataService(http.server.ThreadingHTTPServer):
    """Listens on a free port of the loopback, from `with` to its end.

    Attributes:
        ends_in_s: seconds until this machine's end; None: nothing is announced.
        once: only the first that asks hears of it, as if it were the only machine that goes.
        event, resources: Azure's kind of event, and the machines that it names.
        clock: this service's; None: it does not say what time it is.
        broken: status of all answers instead.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.ends_in_s: float | None = None
        self.once = False
        self.event, self.resources = "Preempt", [MACHINE]
        self.clock: datetime | None = None
        self.broken = 0
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "MetadataService":
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def end(self) -> datetime | None:
        """When this machine ends, by the clock of the service."""
        if self.ends_in_s is None:
            return None
        end = (self.clock or datetime.now(UTC)) + timedelta(seconds=self.ends_in_s)
        if self.once:
            self.ends_in_s = None
        return end.replace(microsecond=0)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: MetadataService

    def do_PUT(self) -> None:
        seconds = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        good = self.path == "/latest/api/token" and 1 <= int(seconds or 0) <= 21_600
        self._answer(200 if good else 400, b"the-token")

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        if path == "/latest/meta-data/spot/instance-action":
            self._aws()
        elif path == "/computeMetadata/v1/instance/preempted":
            good = self.headers.get("Metadata-Flavor") == "Google"
            self._answer(200 if good else 403, b"TRUE" if good and self.server.end() else b"FALSE")
        elif self.headers.get("Metadata") != "true" or "api-version=" not in self.path:
            self._answer(400, b"")
        elif path == "/metadata/scheduledevents":
            self._answer(200, self._events())
        elif path == "/metadata/instance/compute/name":
            self._answer(200, MACHINE.encode())
        else:
            self._answer(404, b"")

    def _aws(self) -> None:
        if self.headers.get("X-aws-ec2-metadata-token") != "the-token":
            self._answer(401, b"")
        elif (end := self.server.end()) is None:
            self._answer(404, b"not found")
        else:
            self._answer(200, msgspec.json.encode({"action": "terminate", "time": end}))

    def _events(self) -> bytes:
        events: list[object] = []
        if end := self.server.end():
            events.append(
                {
                    "EventId": "A123",
                    "EventStatus": "Scheduled",
                    "EventType": self.server.event,
                    "ResourceType": "VirtualMachine",
                    "Resources": self.server.resources,
                    "NotBefore": format_datetime(end, usegmt=True),
                }
            )
        return msgspec.json.encode({"DocumentIncarnation": 1, "Events": events})

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response_only(self.server.broken or status)
        if self.server.clock is not None:
            self.send_header("Date", format_datetime(self.server.clock, usegmt=True))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
