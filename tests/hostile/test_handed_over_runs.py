"""What surrounds a run that is handed over: hostfiles, samples, logs, rewards, data, the hash cache, tiers."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders import cold_tier, write_config
from tests.checkpoint.sealed import save_sealed
from tests.hostile.measured import Measured, measured, measured_program
from tests.hostile.resealed import HOLE, MIB, ROOM_MB, bomb, one_line, put
from tests.journals import append_event
from tests.many_runs import make_run
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths

pytestmark = [pytest.mark.scenario("SEC05"), pytest.mark.slow]
PATIENCE_S = 300.0
"""For a command that reads a few files on a busy machine."""


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir(mode=0o700)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    write_config(paths, name="demo", root=tmp_path / "data")
    return paths


def hole(path: Path, size: int = HOLE) -> None:
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    os.truncate(path, size)


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)


def lead(run: RunPaths, hostfile: Path, word: str) -> Measured:
    words = [word, "--run", run.root, "--hostfile", hostfile, *(["--host", "a"] if word == "join" else [])]
    return measured_program("verl_slurm_daemon", *words, timeout_s=PATIENCE_S)


@pytest.mark.parametrize("make", [hole, fifo])
@pytest.mark.parametrize("word", ["lead", "join"])
def test_a_hostfile_that_is_none_is_refused_at_once(
    run: RunPaths, tmp_path: Path, word: str, make: Callable[[Path], None]
) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=1\nb slots=1\nc slots=1\n")
    good = lead(run, hostfile, word)
    assert good.code == ExitCode.CONFIG, good.err
    make(hostfile)
    done = lead(run, hostfile, word)
    assert done.code == ExitCode.CONFIG, done.err
    assert "at most" in done.err + done.out or "no regular file" in done.err + done.out
    assert done.peak_mb < good.peak_mb + ROOM_MB


def sample_line(step: int) -> bytes:
    return b'{"time":"","run":"0123456789abcdef","attempt":0,"step":%d,"responses":0,"samples":[]}\n' % step


def test_samples_of_any_number_of_steps_are_read_in_one_pass(run: RunPaths) -> None:
    run.samples.write_bytes(sample_line(1))
    good = measured("samples", run.root)
    assert good.code == 0, good.err
    run.samples.write_bytes(b"".join(map(sample_line, range(1, 120_001))))
    done = measured_program("verl_slurm.cli", "samples", run.root, timeout_s=PATIENCE_S)
    assert "step 120000" in " ".join(done.out.split()).replace("step ", "step "), done.out + done.err
    assert done.peak_mb < good.peak_mb + ROOM_MB


@pytest.mark.parametrize("what", ["hole", "bomb", "text"])
def test_samples_that_swell_are_passed_over(run: RunPaths, what: str) -> None:
    run.samples.write_bytes(sample_line(1))
    good = measured("samples", run.root)
    if what == "hole":
        hole(run.samples)
    elif what == "bomb":
        run.samples.write_bytes(bomb(16 * MIB, b'{"a":', b"}\n"))
    else:
        text = '{"sample_id":0,"prompt":"%s","response":"","answer":"","reward":0,"response_tokens":0}'
        line = '{"time":"","run":"0123456789abcdef","attempt":0,"step":%d,"responses":0,"samples":[%s]}\n'
        wide = text % ("a" * 3 * MIB + "\N{PARTY POPPER}")
        run.samples.write_text("".join(line % (number, wide) for number in range(1, 6)))
    done = measured("samples", run.root)
    assert "Traceback" not in done.err
    assert done.peak_mb < good.peak_mb + ROOM_MB


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """The log of a lead, as `logs` finds it."""
    paths = make_run(tmp_path / "told")
    paths.logs.mkdir(exist_ok=True)
    log = paths.logs / "7_0_log.out"
    log.write_text("good\n")
    return log


def test_the_last_lines_of_a_log_without_line_ends_are_not_held_in_memory(told: Path) -> None:
    good = measured("logs", told.parent.parent, "-n", 400)
    assert (good.code, good.out) == (0, "good\n"), good.err
    with told.open("wb") as file:
        for _ in range(400):
            file.write(b"a" * MIB)
    done = measured("logs", told.parent.parent, "-n", 400)
    assert done.code == 0, done.err
    assert done.peak_mb < good.peak_mb + ROOM_MB
    assert measured("logs", told.parent.parent, "-n", 1).out == "a" * MIB + "\n"


def test_a_fifo_in_the_place_of_a_log_is_refused(told: Path) -> None:
    fifo(told)
    done = measured_program("verl_slurm.cli", "logs", told.parent.parent, timeout_s=PATIENCE_S)
    assert done.code == ExitCode.NOT_FOUND
    assert "no regular file" in one_line(done)


def test_a_link_in_the_place_of_a_log_is_not_followed(told: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("mine\n")
    told.unlink(missing_ok=True)
    told.symlink_to(secret)
    done = measured_program("verl_slurm.cli", "logs", told.parent.parent, timeout_s=PATIENCE_S)
    assert done.code == ExitCode.NOT_FOUND
    assert "mine" not in done.out


def test_a_job_id_of_the_journal_leads_to_no_file_elsewhere(told: Path, tmp_path: Path) -> None:
    (tmp_path / "secret_0_log.out").write_text("mine\n")
    append_event(RunPaths(told.parent.parent), "submitted", job_id="../../secret", cluster="slurm", host="h")
    done = measured_program("verl_slurm.cli", "logs", told.parent.parent, timeout_s=PATIENCE_S)
    assert done.code == ExitCode.NOT_FOUND, done.out
    assert "mine" not in done.out


@pytest.mark.parametrize("words", [(), ("-n", "3"), ("--json",)])
def test_nothing_in_a_leads_log_reaches_the_terminal_as_a_command(told: Path, words: tuple[str, ...]) -> None:
    told.write_bytes(b"\x1b]0;owned\x07\x1b[2J\n\x9b31mred \xc2\x9b31m\n\xe2\x80\xaegpj.exe \r forged\n")
    done = measured("logs", told.parent.parent, *words)
    assert done.code == 0, done.err
    assert done.out.count("\n") == 3
    assert not {*done.out} & {"\x1b", "\x07", "\x9b", "\u202e", "\r"}


@pytest.mark.parametrize("source", [None, b"a\n" * (20 * MIB // 2), b"a\n" * (127 << 10)])
def test_a_reward_that_is_handed_over_is_parsed_in_little_memory(
    run: RunPaths, tmp_path: Path, source: bytes | None
) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def score(prompts, responses, answers):\n    return []\n")
    argv = ("update-reward", "--checkpoint", run.root, "--new-model", f"python:{file}:score")
    good = measured(*argv)
    hole(file) if source is None else file.write_bytes(source)
    done = measured(*argv)
    assert done.code in (ExitCode.DATA, ExitCode.CONFIG), done.err
    one_line(done)
    assert done.peak_mb < good.peak_mb + ROOM_MB


def test_a_hash_cache_that_swells_in_memory_is_not_believed(run: RunPaths) -> None:
    good = measured("fingerprint", run.root)
    size = 200 * MIB
    rest = b'{"":[' + b"0," * (size // 2) + b"0]}"
    cache = run.root / ".dataset_hashes"
    cache.write_bytes(b"verl-slurm hash cache 2\n" + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
    cache.chmod(0o600)
    done = measured("fingerprint", run.root)
    assert done.code == good.code, done.err
    # The file itself is read whole, and its rows once more: a good one may be as large.
    assert done.peak_mb < good.peak_mb + 2 * size / 1e6 + ROOM_MB
    assert "JSON values" in done.err


@pytest.mark.parametrize("what", ["a line of gigabytes", "a row that swells", "an array", "a table"])
def test_data_whose_first_row_is_hostile_is_refused_before_queueing(tmp_path: Path, what: str) -> None:
    for folder in ("model", "data"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    (tmp_path / "config.yaml").write_text(
        "name: demo\nmodel:\n  path: model\n  reward: rule:arithmetic\ndata:\n  root: data\n"
    )
    train = tmp_path / "data" / "train.jsonl"
    train.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    argv = ("submit", tmp_path / "config.yaml", "--dry-run", "--cluster", "local")
    good = measured(*argv, cwd=tmp_path)
    if what == "a line of gigabytes":
        train.write_bytes(b'{"prompt": "')
        os.truncate(train, 3 << 30)
    elif what == "a row that swells":
        train.write_bytes(bomb(8 * MIB - 64, b'{"prompt":', b"}\n"))
    else:
        train.unlink()
        suffix = "json" if what == "an array" else "csv"
        content = b"[" + bomb(8 * MIB, b'{"prompt":', b"}]") if what == "an array" else b"," * (8 * MIB - 9)
        (tmp_path / "data" / f"train.{suffix}").write_bytes(content)
    done = measured(*argv, cwd=tmp_path)
    one_line(done)
    assert done.peak_mb < good.peak_mb + ROOM_MB


@pytest.fixture
def archived(run: RunPaths, tmp_path: Path) -> Path:
    """A checkpoint that only a tier has; the directory it lies in there."""
    (tmp_path / "cold").mkdir(mode=0o700)
    cold = cold_tier(tmp_path / "cold")
    write_config(run, name="demo", root=tmp_path / "data", tiers=(cold,))
    there = save_sealed(run, 1, None)
    assert measured("tiers", run.root, "--offload").code == 0
    shutil.rmtree(there)
    return next((tmp_path / "cold").rglob("manifest.json")).parent


@pytest.mark.parametrize("what", ["manifest", "manifest hole", "file", "fifo"])
def test_a_forged_checkpoint_in_a_tier_is_not_brought_back(run: RunPaths, archived: Path, what: str) -> None:
    good = measured("tiers", run.root, "--fetch-back")
    assert good.code == 0, good.err
    shutil.rmtree(run.checkpoints / "step_000001")
    if what == "manifest":
        (archived / "manifest.json").write_bytes(bomb(40 * MIB, b'{"a":', b"}"))
    elif what == "manifest hole":
        hole(archived / "manifest.json")
    elif what == "fifo":
        fifo(archived / "metadata.json")
    else:
        put(archived, "metadata.json", None)
        (archived / "metadata.json").write_bytes(b"{}")
    done = measured_program("verl_slurm.cli", "tiers", run.root, "--fetch-back", timeout_s=PATIENCE_S)
    assert done.code != 0
    one_line(done)
    assert done.peak_mb < good.peak_mb + ROOM_MB
    assert not (run.checkpoints / "step_000001").exists()


@pytest.mark.parametrize("words", [["--offload"], ["--offload", "--dry-run"], ["sync"]], ids=" ".join)
def test_a_copy_that_is_handed_back_changes_nothing_in_the_tier_of_its_original(
    run: RunPaths, archived: Path, tmp_path: Path, words: list[str]
) -> None:
    """With the original's run id its keys in the tier are the original's; a manifest says any attempt."""
    before = {path.name: path.read_bytes() for path in archived.rglob("*") if path.is_file()}
    copy = tmp_path / "copy"
    shutil.copytree(run.root, copy)
    there = copy / "checkpoints" / archived.name
    shutil.copytree(archived, there)
    manifest = json.loads((there / "manifest.json").read_bytes())
    (there / "manifest.json").write_text(json.dumps(manifest | {"attempt": 99}))
    put(there, "actor/rank_0000.bin", b"other weights")
    for path in there.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    if words == ["sync"]:  # as the lead starts it
        done = measured_program("verl_slurm.tiers", "sync", "--run", copy)
        assert done.err.startswith("a copy, or a run that was moved")
    else:
        done = measured("tiers", *words, copy)
        assert "a copy, or a run that was moved" in one_line(done)
    assert done.code == ExitCode.CONFIG, done.err
    assert done.err.count("\n") == 1
    assert str(run.root) in done.err
    assert {path.name: path.read_bytes() for path in archived.rglob("*") if path.is_file()} == before
    assert measured("tiers", run.root, "--offload").code == 0


def test_a_large_forged_file_in_a_tier_is_brought_back_in_little_memory(
    run: RunPaths, archived: Path
) -> None:
    good = measured("tiers", run.root, "--fetch-back")
    shutil.rmtree(run.checkpoints / "step_000001")
    put(archived, "metadata.json", None)
    done = measured("tiers", run.root, "--fetch-back")
    assert done.peak_mb < good.peak_mb + ROOM_MB
    inspected = measured("inspect", run.root)
    assert "at most" in one_line(inspected)
    assert inspected.peak_mb < good.peak_mb + ROOM_MB


def test_a_file_that_is_exchanged_while_inspect_looks_is_refused_or_shown_whole(run: RunPaths) -> None:
    there = save_sealed(run, 1, None)
    good = measured("inspect", there)
    path, other = there / "metadata.json", there.parent / "other"
    content = path.read_bytes()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.set_blocking(read, False)
        while True:
            for make in (hole, fifo, lambda place: place.write_bytes(content)):
                make(other)
                other.chmod(0o600)
                os.replace(other, path)
            try:
                if not os.read(read, 1):
                    os._exit(0)
            except BlockingIOError:
                pass
    os.close(read)
    try:
        for _ in range(8):
            done = measured_program("verl_slurm.cli", "inspect", there, timeout_s=PATIENCE_S)
            assert done.code == 0 or one_line(done)
            assert done.code in (0, ExitCode.CORRUPT), done.err
            assert done.peak_mb < good.peak_mb + ROOM_MB
    finally:
        os.close(write)
        os.waitpid(child, 0)
