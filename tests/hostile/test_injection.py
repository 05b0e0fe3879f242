"""Text of strangers: one record stays one record, labels stay labels, and no escape sequence reaches a terminal."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from verl_slurm_daemon.agent.agent_log import AgentLog
from verl_slurm_daemon.journal import Journal, Status, log_line
from verl_slurm_daemon.lead.lead_metrics import LeadMetrics

from tests.builders import write_config
from tests.cli.conftest import (
    Cli,
    cli as cli,  # a fixture
)
from tests.journals import make_event
from verl_slurm.base.errors import ConfigError, TierError, VerlSlurmError
from verl_slurm.base.files import private_dir
from verl_slurm.base.one_line import json_line, printable
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.load import parse_config
from verl_slurm.config.schema import ObservabilityConfig, RunConfig, TierConfig
from verl_slurm.journal.events import (
    KINDS,
    Avoid,
    Cause,
    Crash,
    Ended,
    Event,
    Other,
    Requeue,
    Saved,
    Stranger,
    Verified,
    Warned,
)
from verl_slurm.journal.files import append_event, parse_event, read_events, to_json

EVIL = (
    'x\n{"event":"ended","exit_code":0}\r\nGET \x1b[31m\x1b]0;title\x07\x9b2J\x85\u2028\u2029\u202e"}} 1\n'
    "verl_run_step 99\n\x00\x7f'\\ key=value verl-slurm[9] ended \udc80\ufeff"
)
"""Newlines of five kinds, colours in 7 and 8 bits, a title, another direction, quotes, braces, a NUL, no UTF-8."""

BAD = {chr(c) for c in [*range(32), *range(127, 160), 0x2028, 0x2029, 0x202E, 0xFEFF]} - {"\n"}


def is_clean(text: str) -> bool:
    return not BAD & set(text)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(private_dir(tmp_path / "run"))
    paths.run_yaml.touch()  # without it RUN is away
    return paths


@pytest.mark.scenario("M11")
def test_one_event_stays_one_line_by_anybodys_rule_and_is_read_back_whole(paths: RunPaths) -> None:
    clean = EVIL.replace("\udc80", "")
    append_event(paths, Avoid([clean], clean))
    append_event(paths, Crash(EVIL))
    append_event(paths, Other(clean, {clean: 1}))
    text = paths.events.read_text()
    assert len(text.splitlines()) == 3
    assert is_clean(text)
    avoid, crash, other = (to_json(event) for event in read_events(paths))
    assert (avoid["detail"], avoid["nodes"], other[clean]) == (clean, [clean], 1)
    assert crash["detail"] == EVIL.replace("\udc80", "\\udc80")


@pytest.mark.scenario("M11")
def test_a_journal_that_was_told_anything_goes_on(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(paths, attempt=1, job_id="7")
    journal.write(Other(EVIL, {"detail": EVIL, "error": EVIL}))
    journal.status(Status(state=EVIL, cause=EVIL))
    journal.write(Ended(0, reason=EVIL))
    said = capsys.readouterr().out
    assert len(said.splitlines()) == 2
    assert is_clean(said)
    assert len(paths.events.read_text().splitlines()) == 2
    assert len(paths.status.read_text().splitlines()) == 1


@pytest.mark.scenario("M11")
def test_a_line_of_a_log_is_one_line_and_its_facts_are_its_own(tmp_path: Path) -> None:
    AgentLog(tmp_path / "log", f"3 {EVIL}").say("failed", loud=True, error=EVIL, where=[EVIL], **{EVIL: EVIL})
    text = (tmp_path / "log").read_text()
    assert len(text.splitlines()) == 1
    assert is_clean(text)
    line = log_line("1", "crash", {"detail": 'x" exit_code=0 y="z'})
    assert line.rstrip().endswith(r'detail="x\" exit_code=0 y=\"z"')


@pytest.mark.scenario("M11")
def test_an_error_is_one_line_whatever_it_is_about() -> None:
    fields: dict[str, object] = dict.fromkeys(("where", "found", "expected", "remedy"), EVIL)
    line = VerlSlurmError(EVIL, **fields).one_line()  # type: ignore[arg-type]
    assert is_clean(line)
    assert len(line.splitlines()) == 1


@pytest.mark.scenario("M11")
def test_a_server_s_words_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.exceptions import ClientError

    from verl_slurm.checkpoint.tiers.s3 import S3Place

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIACANARY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-secret")
    tier = TierConfig(name="s", kind="s3", bucket="b", endpoint="http://127.0.0.1:9", region="us-east-1")
    place = S3Place(tier)
    answer = {"Error": {"Code": EVIL, "Message": f"canary-secret {EVIL}"}}
    with pytest.raises(TierError) as refused, place._errors("key"):
        raise ClientError({**answer, "ResponseMetadata": {"HTTPStatusCode": 403}}, "PutObject")  # type: ignore[arg-type,typeddict-item]
    assert "unknown 403" in str(refused.value)
    assert "canary" not in str(refused.value)
    assert refused.value.__cause__ is None


@pytest.mark.scenario("M11")
def test_labels_are_a_closed_list_and_the_page_stays_parsable(paths: RunPaths) -> None:
    observability = ObservabilityConfig(metrics_port=0, token_file="/token")
    config = RunConfig(name=EVIL, observability=observability)
    status = Status(state=EVIL, phase=EVIL, cause=EVIL, metrics={EVIL: 1.0})
    metrics = LeadMetrics(paths, config, status, lambda: 1.8e9)
    asyncio.run(metrics.read_back())
    for number in range(500):
        told = f"{EVIL}{number}"
        for event in (
            Cause(told, told),
            Crash(told, told),
            Saved(told, reason=told),
            Verified(told),
            Warned(told, told),
        ):
            metrics.journaled(event)
        for other in (Requeue(True, told), Stranger(told, told), Other(told, {"name": told})):
            metrics.journaled(other)
    metrics.refused = {"token": 3}
    page = metrics._exporter._page().decode()
    assert is_clean(page)
    found = [s for family in text_string_to_metric_families(page) for s in family.samples]
    assert len(found) < 100
    assert ("verl_control_refused_total", {"reason": "token"}, 3.0) in [
        (s.name, s.labels, s.value) for s in found
    ]
    assert not any(EVIL[:8] in value for s in found for value in s.labels.values())


@pytest.mark.scenario("M11")
@pytest.mark.parametrize(
    "key", ["name", "slurm.partition", "slurm.account", "model.path", "data.root", "run_dir"]
)
def test_a_name_in_the_configuration_that_breaks_a_line_is_refused(key: str) -> None:
    section, _, leaf = key.rpartition(".")
    for character in ("\n", "\r", "\x1b", "\x9b", "\u2028", "\x00", "\x85"):
        value = json.dumps(f"a{character}b")
        text = f"{section}:\n  {leaf}: {value}\n" if section else f"{leaf}: {value}\n"
        with pytest.raises(ConfigError) as refused:
            parse_config(text.encode(), "my.yaml")
        assert is_clean(refused.value.one_line())


def _evil(kind: str) -> Event:
    """An event of that kind, with evil text wherever text may stand."""
    event = make_event(kind, job_id="7", attempt=1)
    for field in msgspec.structs.fields(event):
        if field.name not in ("job_id", "cluster") and isinstance(getattr(event, field.name), str | None):
            setattr(event, field.name, EVIL)
    return event


@pytest.fixture
def handed_over(paths: RunPaths) -> RunPaths:
    """A run that somebody else has written every file of."""
    write_config(paths, name="demo")
    logs = private_dir(paths.logs)
    raw = EVIL.encode("utf-8", "surrogateescape")
    lines = [to_json(_evil(kind)) for kind in KINDS if kind not in ("submitted", "ended")]
    lines += [{"event": name, "attempt": EVIL, "time": EVIL, "reason": EVIL} for name in ("crash", EVIL)]
    lines += [{"event": "submitted", "job_id": "7", "cluster": "local", "host": EVIL, "time": EVIL}]
    lines += [{"event": "ended", "job_id": "7", "exit_code": 22, "exit": EVIL, "reason": EVIL}]
    # As an enemy would, without our escapes.
    text = "\n".join(json.dumps(line, ensure_ascii=False).replace("\udc80", "") for line in lines)
    paths.events.write_text(text + "\n")
    status = {"state": EVIL, "phase": EVIL, "last_checkpoint": EVIL, "step": 1, "steps": 2, "updated": EVIL}
    paths.status.write_text(json.dumps(status, ensure_ascii=False).replace("\udc80", ""))
    paths.steps.write_text(json.dumps({"step": 1, EVIL[:20]: 1.0, "time": EVIL}) + "\n")
    for name in (
        "7_0_log.out",
        "attempt_000001.restart_01.node_0000.log",
        "attempt_000001.node_0000.agent.log",
    ):
        (logs / name).write_bytes(raw)
    (logs / "a\x1b[31m\n.log").touch()
    (private_dir(paths.checkpoints) / "step_000001\x1b[31m").mkdir()
    (private_dir(paths.quarantine) / "a\x9b31m\n").mkdir()
    return paths


@pytest.mark.scenario("M11")
def test_no_command_hands_an_escape_sequence_of_a_stranger_on(handed_over: RunPaths, cli: Cli) -> None:
    for words in (
        *(
            "status RUN",
            "status RUN --json",
            "watch RUN",
            "watch RUN --json",
            "list RUN/..",
            "list RUN/.. --json",
        ),
        *("logs RUN", "logs RUN -n 3", "logs RUN --json", "logs RUN --node 0", "logs RUN --node 0 --agent"),
        *(
            "logs RUN --all",
            "verify RUN",
            "prune RUN --dry-run",
            "status RUN\x1b[31m",
            "status RUN\x1b[31m --json",
        ),
        *("\x1b[31mstatus", "status RUN --\x1b[31m"),
    ):
        said = cli(*(word.replace("RUN", str(handed_over.root)) for word in words.split(" ")))
        assert said.out + said.err, words
        assert is_clean(said.out.replace("\t", "")), (words, said.out)
        assert is_clean(said.err), (words, said.err)
        assert "Traceback" not in said.err
        if "--json" in words:
            for line in said.out.splitlines():
                json.loads(line)


@pytest.mark.scenario("M11")
def test_a_real_terminal_gets_no_escape_sequence_of_a_stranger(handed_over: RunPaths) -> None:
    """Where there is a terminal, our own colours and rewritten lines are allowed, and nobody else's."""
    probe = (
        "import sys\nfrom verl_slurm.cli.__main__ import main\n"
        "for words in (['status'], ['watch'], ['logs'], ['list'], ['checkpoints']):\n"
        "    main([*words, sys.argv[1] + ('/..' if words == ['list'] else '')])\n"
    )
    outer, inner = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", probe, str(handed_over.root)],
        stdin=subprocess.DEVNULL,
        stdout=inner,
        stderr=inner,
    ) as process:
        os.close(inner)
        said = b""
        with contextlib.suppress(OSError):  # EIO: nobody holds the other end any more
            while data := os.read(outer, 65536):
                said += data
    os.close(outer)
    assert process.returncode == 0, said.decode(errors="replace")
    assert b"\x1b" in said, "ours are there: it did take this for a terminal"
    for bad in (
        b"\x1b[31m\x1b]0;",
        b"\x1b]",
        b"\x07",
        "\x9b".encode(),
        "\u2028".encode(),
        "\u202e".encode(),
        b"\x00",
    ):
        assert bad not in said, bad


def test_json_is_read_back_as_the_same_value() -> None:
    value = {"a": ["ä€😀\U000e0001", "\u2028\x85\x7f\x9b", 1.5, None, True], "\u2028": "x"}
    line = json_line(value)
    assert json.loads(line) == value
    assert "ä€😀".encode() in line, "what can be printed stays as it is"
    assert parse_event(json_line({"event": "x"})) == Other("x")
    assert printable("ä€😀") == "ä€😀"
