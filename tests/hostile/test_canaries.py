"""Secrets are planted in a real run, and looked for in everything that it leaves, shows or hands on.

One run, through submit and submitit, encrypted, with an S3 tier, a second copy on the node's disk, metrics and a reward
of the user's, which holds it up until the test has looked; it is requeued once. The umask outside is 0: what is
private is so because we make it so.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.fakes.s3_server import BUCKET, StandIn
from tests.harness import ROOT, SMALL, wait_until_gone
from tests.hostile.planted import (
    KEY,
    OLD_KEY,
    PLANTED,
    SCRAPE_TOKEN,
    Watcher,
    forms_of,
    found_in,
    leaks,
    modes,
)
from tests.journals import read_events
from tests.lines import follow_lines
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.paths import RunPaths

pytestmark = [pytest.mark.torch, pytest.mark.long]

REWARD = """\
import os

GATE = os.environ["GATE"]

def score(prompts, responses, answers):
    assert os.environ["JUDGE_API_KEY"].startswith("sk-canary")
    if os.path.exists(GATE):
        open(GATE).close()  # until somebody opens its other end
    return [float(len(set(response))) for response in responses]
"""

# What a person may ask for afterwards; in one process, for the sake of the time that imports take.
AFTERWARDS = """
import sys
from verl_slurm.cli.__main__ import main
for words in (
    "status RUN", "status RUN --json", "watch RUN --json", "logs RUN", "logs RUN --node 0", "logs RUN --node 0 --agent",
    "inspect RUN --json", "verify RUN", "tiers RUN --offload --json", "tiers RUN --json", "verify RUN --scrub",
):
    code = main([word.replace("RUN", sys.argv[1]) for word in words.split()])
    print(f"\\nENDED WITH {code}", flush=True)
"""


@dataclass
class Produced:
    """What one run left, and what was seen while it was at work."""

    base: Path
    watcher: Watcher
    server: StandIn
    said: dict[str, bytes] = field(default_factory=dict)
    """What each command of ours printed, and each answer of the metrics ports."""
    alive: list[str] = field(default_factory=list)
    """Where the control token was found while the run lived."""

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.base / "run")

    @property
    def places(self) -> list[Path]:
        """Everything that the run wrote: its directory, the node's disk, its temporary files."""
        return [self.base / "run", self.base / "nvme", self.base / "tmp"]

    @property
    def secrets(self) -> dict[str, bytes | str]:
        fixed: dict[str, bytes | str] = {**PLANTED, "key": KEY, "old key": OLD_KEY, "scrape": SCRAPE_TOKEN}
        return fixed | self.watcher.secrets

    @property
    def ours(self) -> dict[str, bytes | str]:
        """Without what the user put into the environment of his job himself."""
        return {name: value for name, value in self.secrets.items() if name not in PLANTED}


def overrides(base: Path, server: StandIn) -> list[str]:
    tier = {
        "name": "store",
        "kind": "s3",
        "bucket": BUCKET,
        "endpoint": server.endpoint,
        "region": "us-east-1",
    }
    return [
        *SMALL,
        "train.steps=2",
        "train.batch_size_per_device=32",
        "checkpoint.every_steps=2",
        "distributed.nodes=1",
        "distributed.dp_size=1",
        f"run_dir={base / 'run'}",
        f"model.reward=python:{base / 'reward.py'}:score",
        f"checkpoint.local_dir={base / 'nvme'}",
        f"checkpoint.encryption.key_file={base / 'keys' / 'run.key'}",
        f"checkpoint.encryption.old_key_files=[{base / 'keys' / 'old.key'}]",
        "observability.metrics_port=0",
        f"observability.token_file={base / 'keys' / 'scrape.token'}",
        f"tiers=[{json.dumps(tier)}]",
    ]


def plant(base: Path) -> None:
    for name in ("keys", "tmp", "home"):
        private_dir(base / name)
    write_file(base / "keys" / "run.key", KEY.hex().encode() + b"\n")
    write_file(base / "keys" / "old.key", OLD_KEY)
    write_file(base / "keys" / "scrape.token", SCRAPE_TOKEN.encode() + b"\n")
    write_file(base / "reward.py", REWARD.encode())
    os.mkfifo(base / "gate", 0o600)


def environment(base: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "AWS"))}
    mine = {
        "GATE": str(base / "gate"),
        "TMPDIR": str(base / "tmp"),
        "HOME": str(base / "home"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    return clean | PLANTED | mine


def command(base: Path, *words: object) -> bytes:
    return python(base, "-m", "verl_slurm.cli", *words)


def python(base: Path, *words: object) -> bytes:
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env=environment(base),
        cwd=base,
        umask=0,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode(errors="replace")
    return done.stdout


def wait_for(paths: RunPaths, event: str, attempt: int) -> None:
    for line in follow_lines(paths.events, silence_s=lambda: 300.0):
        assert line is not None, f"no {event} for five minutes: {read_events(paths)}"
        found = json.loads(line)
        assert found["event"] != "ended" or found["exit_code"] in (0, 25), read_events(paths)
        if found["event"] == event and found.get("attempt") == attempt:
            return


def scrape(produced: Produced) -> None:
    """The pages of lead and agent: with the token, without it, and with a wrong one."""
    for file in sorted(produced.paths.metrics.iterdir()):
        (entry,) = json.loads(file.read_bytes())
        for what, header in (("with", f"Bearer {SCRAPE_TOKEN}"), ("without", ""), ("wrong", "Bearer x")):
            request = urllib.request.Request(
                f"http://{entry['targets'][0]}/metrics", headers={"Authorization": header}
            )
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    said = str(answer.headers).encode() + answer.read()
            except urllib.error.HTTPError as refused:
                said = str(refused.headers).encode() + refused.read()
            produced.said[f"{entry['labels']['instance']} {what} token"] = said


@pytest.fixture(scope="module")
def produced() -> Iterator[Produced]:
    with tempfile.TemporaryDirectory(prefix="vs-") as directory:
        base = Path(directory)
        plant(base)
        # The kernel's default: who has held keys in this process has left another one behind, and it is inherited.
        Path("/proc/self/coredump_filter").write_text("0x33")
        server = StandIn().start()
        watcher = Watcher(base / "run")
        produced = Produced(base, watcher, server)
        try:
            with watcher:
                words = [ROOT / "configs/quickstart.yaml", *overrides(base, server)]
                produced.said["submit"] = command(base, "submit", *words, "--cluster", "local", "--json")
                wait_for(produced.paths, "first_rollout", 1)
                watcher.look()
                scrape(produced)
                produced.alive = leaks(produced.places, watcher.secrets)
                produced.said["requeue"] = command(base, "requeue", base / "run")
                wait_for(produced.paths, "save", 1)
                gate = os.open(base / "gate", os.O_WRONLY)  # until the rank is there
                (base / "gate").unlink()
                os.close(gate)
                produced.said["watch"] = command(base, "watch", base / "run")
            wait_until_gone(str(base / "run"))
            produced.said["afterwards"] = said = python(base, "-c", AFTERWARDS, base / "run")
            assert said.count(b"\nENDED WITH 0\n") == said.count(b"\nENDED WITH ") == 11, said.decode()
            yield produced
        finally:
            for process in watcher.processes_alive():
                process.kill()
            server.stop()


def test_every_form_of_a_secret_is_found() -> None:
    import base64

    for data in (KEY, KEY.hex().encode(), KEY.hex().upper().encode(), b"x" + KEY.hex().encode()[5:40]):
        assert found_in(b"before " + data + b" behind", {"key": KEY}) == ["key"]
    for ahead in (b"", b"a", b"ab", b"abc"):
        assert found_in(base64.b64encode(ahead + KEY), {"key": KEY}) == ["key"]
    assert found_in(b"nothing", {"key": KEY}) == []
    assert all(len(form) == 16 for value in PLANTED.values() for form in forms_of(value))


@pytest.mark.scenario("M08")
def test_no_secret_is_in_anything_that_a_run_leaves(produced: Produced) -> None:
    assert len(produced.watcher.tokens) == 2, "each attempt has a token of its own"
    assert len(list(produced.base.rglob("step_*/manifest.json"))) >= 2, "it was there to be looked through"
    assert leaks(produced.places, produced.secrets) == []


@pytest.mark.scenario("M08")
def test_while_it_lives_the_control_token_is_in_its_one_file(produced: Produced) -> None:
    assert produced.alive == [f"control token 0 in {produced.paths.lead_address}"]


@pytest.mark.scenario("M08")
def test_no_secret_is_in_an_argument_of_any_process(produced: Produced) -> None:
    lines = produced.watcher.cmdlines
    for role in (
        b"lead",
        b"agent",
        b"verl_slurm_daemon.agent.ranks",
        b"verl_slurm.trainer",
        b"verl_slurm.checkpoint.tiers",
    ):
        assert any(role in line.split(b"\0") for line in produced.watcher.processes), f"no {role!r} was seen"
    assert found_in(b"\n".join(sorted(lines)), produced.secrets) == []


@pytest.mark.scenario("M08")
def test_the_daemon_puts_no_secret_of_its_own_into_an_environment(produced: Produced) -> None:
    for cmdline, seen in produced.watcher.processes.items():
        assert found_in(seen.environ, produced.ours) == [], cmdline


@pytest.mark.scenario("M08")
def test_no_secret_is_on_a_metrics_page_or_in_what_a_command_prints(produced: Produced) -> None:
    assert b"verl_run_step" in produced.said["lead with token"]
    assert b"verl_agent_ranks_heard" in produced.said["node_0000 with token"]
    assert b"verl_" not in produced.said["lead without token"] + produced.said["lead wrong token"]
    found = {what: found_in(said, produced.secrets) for what, said in produced.said.items()}
    assert not any(found.values()), found


@pytest.mark.scenario("M08")
def test_no_secret_is_in_the_bucket_or_in_its_metadata(produced: Produced) -> None:
    objects = produced.server.objects
    assert objects, "nothing came to the bucket"
    for key, stored in objects.items():
        told = json.dumps([key, stored.metadata, stored.etag]).encode()
        assert found_in(told + stored.data, produced.secrets) == [], key
        assert set(stored.metadata) <= {"x-amz-meta-sha256"}, "the server is told a digest and nothing else"


@pytest.mark.scenario("M08")
def test_no_process_of_a_run_can_leave_a_core_with_a_secret(produced: Produced) -> None:
    checked = 0
    for cmdline, seen in produced.watcher.processes.items():
        words = cmdline.split(b"\0")
        if (
            b"verl_slurm_daemon" in words
            or b"verl_slurm.trainer" in words
            or b"verl_slurm.checkpoint.tiers" in words
        ):
            assert seen.core_limit == "0 0", (words, seen.core_limit)
            # Where cores go to a program (systemd-coredump, apport) the kernel does not look at the limit.
            assert int(seen.dump_filter, 16) == 0, (words, seen.dump_filter)
            checked += 1
    assert checked >= 4


@pytest.mark.scenario("M08")
def test_all_that_a_run_leaves_is_for_its_owner_alone(produced: Produced) -> None:
    assert modes([produced.base / "run", produced.base / "nvme"]) == []
    # An empty directory of torch's, from before the run: submit builds the model in a process that imports it.
    left = [path for path in (produced.base / "tmp").rglob("*") if not path.name.startswith("torchinductor_")]
    assert left == [], "temporary files outlived the run"
