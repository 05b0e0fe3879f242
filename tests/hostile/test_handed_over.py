"""Files that somebody hands over: a command takes no more than 300 MB for them than for good ones, and ends.

Each command is a child process whose peak is measured; what is hostile is made by hand, with no more than a shell and
the format's page.
"""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders import write_config
from tests.checkpoint.sealed import save_sealed
from tests.hostile.measured import measured
from tests.hostile.resealed import HOLE, MIB, ROOM_MB, bomb, one_line, put
from verl_slurm.base.paths import RunPaths

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one small whole checkpoint."""
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir(mode=0o700)
    write_config(paths, name="demo")
    save_sealed(paths, 1, None)
    return paths.root


@pytest.fixture
def checkpoint(run: Path) -> Path:
    return run / "checkpoints" / "step_000001"


SMALL_FILES = (
    *("metadata.json", "orchestration.json", "scheduler.json", "schema_version.json", "config.yaml"),
    "runtime_state.rank_0000.msgpack.zst",
)


@pytest.mark.scenario("SEC04")
@pytest.mark.parametrize("name", SMALL_FILES)
def test_a_hole_in_a_small_file_is_never_read_into_memory(run: Path, checkpoint: Path, name: str) -> None:
    good = measured("inspect", checkpoint)
    assert good.code == 0, good.err
    put(checkpoint, name, None)
    done = measured("inspect", checkpoint)
    assert done.peak_mb < good.peak_mb + ROOM_MB, done.err
    # Of another rank's state, only that it cannot be read is said.
    assert done.code == 0 if name.startswith("runtime") else one_line(done)


@pytest.mark.scenario("SEC04")
def test_a_hole_in_one_of_two_checkpoints_does_not_fill_the_memory_of_diff(
    run: Path, checkpoint: Path
) -> None:
    other = save_sealed(RunPaths(run), 2, None)
    good = measured("inspect", checkpoint, other)
    put(other, "metadata.json", None)
    done = measured("inspect", checkpoint, other)
    assert done.peak_mb < good.peak_mb + ROOM_MB
    assert "at most" in one_line(done)


@pytest.mark.scenario("SEC05")
@pytest.mark.parametrize("command", ["inspect", "verify", "list"])
def test_a_manifest_of_empty_lists_takes_little_memory(run: Path, checkpoint: Path, command: str) -> None:
    what = run if command == "list" else checkpoint
    good = measured(command, what)
    manifest = (checkpoint / "manifest.json").read_bytes()
    (checkpoint / "manifest.json").write_bytes(bomb(20 * MIB, b'{"a":', b"," + manifest.lstrip()[1:]))
    done = measured(command, what)
    assert done.peak_mb < good.peak_mb + ROOM_MB
    assert "JSON values" in done.out + done.err or "torn" in done.out


@pytest.mark.scenario("SEC05")
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("metadata.json", lambda: bomb(20 * MIB, b'{"history":', b"}")),
        ("orchestration.json", lambda: bomb(32 * MIB, b'{"data_files":', b"}")),
        ("scheduler.json", lambda: bomb(20 * MIB, b'{"actor":', b"}")),
        ("schema_version.json", lambda: bomb(20 * MIB, b'{"code_version":', b"}")),
        ("config.yaml", lambda: b"a: [" + b"{}," * 300_000 + b"1]\n"),
        ("actor/index.json", lambda: bomb(30 * MIB, b'{"tensors":{"a":{"dtype":', b"}}}")),
        (
            "actor/index.json",
            lambda: (
                b'{"tensors":{"a":{"dtype":"int8","pieces":[],"shape":[' + b"1000," * (6 * MIB) + b"1]}}}"
            ),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_json_in_a_checkpoint_that_swells_in_memory_is_refused_first(
    run: Path, checkpoint: Path, name: str, data: Callable[[], bytes]
) -> None:
    good = measured("inspect", checkpoint)
    put(checkpoint, name, data())
    done = measured("inspect", checkpoint)
    assert done.peak_mb < good.peak_mb + ROOM_MB
    assert done.seconds < good.seconds + 60
    one_line(done)


@pytest.mark.scenario("SEC05")
def test_an_index_too_large_for_a_look_is_not_listed_and_the_rest_is_shown(
    run: Path, checkpoint: Path
) -> None:
    piece = b'{"at":0,"file":"rank_0000.bin","offset":[0],"shape":[0]}'
    index = b'{"format":1,"tensors":{"a":{"dtype":"int8","pieces":[%b],"shape":[0]}}}'
    put(checkpoint, "actor/index.json", index % b",".join([piece] * 620_000))
    done = measured("inspect", checkpoint)
    assert done.code == 0, done.err
    assert "not listed" in done.out
    assert done.peak_mb < ROOM_MB


@pytest.mark.scenario("SEC05")
@pytest.mark.parametrize("doubled", [b'{"step":9,', b'{"st\\u0065p":9,', b'{"topology":{"dp":1,"dp":2},'])
def test_a_manifest_with_a_key_twice_is_still_refused(checkpoint: Path, doubled: bytes) -> None:
    path = checkpoint / "manifest.json"
    path.write_bytes(doubled + path.read_bytes().lstrip()[1:])
    done = measured("verify", checkpoint)
    assert done.code != 0
    assert "twice" in done.out + done.err


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """A directory of verl's with one step, of which the JSON files alone are looked at here."""
    step = tmp_path / "verl" / "global_step_1"
    (step / "actor" / "huggingface").mkdir(parents=True)
    (step / "actor" / "huggingface" / "tokenizer.json").write_text("{}")
    return step


@pytest.mark.scenario("SEC05")
@pytest.mark.parametrize("count", [1, 3])
def test_adopt_makes_no_objects_of_the_json_it_looks_at(steps: Path, count: int) -> None:
    good = measured("adopt", steps.parent, "--dry-run")
    for number in range(count):
        (steps / "actor" / "huggingface" / f"{number}.json").write_bytes(bomb(32 * MIB))
    done = measured("adopt", steps.parent, "--dry-run")
    assert done.peak_mb < good.peak_mb + ROOM_MB


@pytest.mark.scenario("SEC05")
def test_adopt_reads_nothing_of_what_it_refuses_for_its_owner(steps: Path) -> None:
    (steps / "actor" / "huggingface" / "tokenizer.json").write_text("no JSON")
    assert "not JSON" in measured("adopt", steps.parent, "--dry-run", "--json").out
    steps.chmod(0o777)
    done = measured("adopt", steps.parent, "--dry-run", "--json")
    assert "may be written by others" in done.out
    assert "not JSON" not in done.out


@pytest.mark.scenario("SEC05")
@pytest.mark.parametrize("num_bytes", [15 * MIB, 32 * MIB], ids=["within", "beyond"])
def test_the_directory_of_a_zip_that_swells_in_memory_is_refused(steps: Path, num_bytes: int) -> None:
    good = measured("adopt", steps.parent, "--dry-run")
    names = num_bytes // 54
    record = struct.Struct("<4s6H3I5H2I")
    directory = b"".join(
        record.pack(b"PK\1\2", 0, 0, 8, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0) + b"a/%06x" % number
        for number in range(names)
    )
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0, 0, len(directory), 2, 0)
    for name in ("data.pt", "data_1.pt", "data_2.pt"):
        (steps / name).write_bytes(b"PK" + directory + end)
    done = measured("adopt", steps.parent, "--dry-run")
    print(f"{done.peak_mb:.0f} MB for three, {good.peak_mb:.0f} MB without, {done.seconds:.1f} s")
    assert done.peak_mb < good.peak_mb + ROOM_MB


@pytest.mark.scenario("SEC05")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("status.json", ("status", "RUN")),
        ("events.jsonl", ("status", "RUN")),
        ("events.jsonl", ("list", "RUN/..")),
        ("steps.jsonl", ("steps", "RUN")),
        ("run.yaml", ("status", "RUN")),
        (".dataset_fingerprint", ("fingerprint", "RUN")),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
@pytest.mark.parametrize("what", ["hole", "bomb"])
def test_a_run_of_another_user_does_not_fill_the_memory_of_who_looks_at_it(
    run: Path, name: str, words: tuple[str, ...], what: str
) -> None:
    argv = [word.replace("RUN", str(run)) for word in words]
    good = measured(*argv)
    path = run / name
    path.write_bytes(b"" if what == "hole" else bomb(40 * MIB, b'{"event":"started","time":', b"}\n"))
    if what == "hole":
        os.truncate(path, HOLE)
    path.chmod(0o600)
    done = measured(*argv)
    assert "Traceback" not in done.err
    assert done.peak_mb < good.peak_mb + ROOM_MB
    assert done.seconds < good.seconds + 60


@pytest.mark.scenario("SEC05")
@pytest.mark.parametrize("line", [b"ab\n", b"\n", b'{"event":""}\n'], ids=repr)
def test_a_journal_of_very_short_lines_takes_little_memory_and_time(run: Path, line: bytes) -> None:
    good = measured("status", run)
    (run / "events.jsonl").write_bytes(line * (32 * MIB // len(line)))
    done = measured("status", run)
    assert "Traceback" not in done.err
    assert done.peak_mb < good.peak_mb + ROOM_MB
    assert done.seconds < good.seconds + 30


@pytest.mark.scenario("SEC05")
def test_a_checkpoint_with_thousands_of_files_beside_its_own_is_refused_unread(checkpoint: Path) -> None:
    for number in range(6000):
        os.close(os.open(checkpoint / f"{number:04}", os.O_CREAT, 0o600))
    done = measured("verify", checkpoint, "--json")
    assert done.code != 0
    (one,) = json.loads(done.out)["checkpoints"]
    (problem,) = one["problems"]
    assert (problem["path"], problem["kind"]) == (".", "damaged")
    assert "more than 41" in problem["what"]
    assert one["num_bytes"] == 0


@pytest.mark.scenario("SEC05")
@pytest.mark.parametrize("what", ["config.json", "safetensors", "hole"])
def test_a_model_directory_that_swells_in_memory_is_refused_before_queueing(
    tmp_path: Path, what: str
) -> None:
    model = tmp_path / "model"
    for folder in (model, tmp_path / "data"):
        folder.mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    (tmp_path / "config.yaml").write_text(
        "name: demo\nmodel:\n  path: model\n  reward: rule:arithmetic\ndata:\n  root: data\n"
    )
    argv = ("submit", tmp_path / "config.yaml", "--dry-run", "--cluster", "local")
    good = measured(*argv, cwd=tmp_path)
    if what == "config.json":
        (model / "config.json").write_bytes(bomb(30 * MIB, b'{"model_type":"qwen2","a":', b"}"))
    elif what == "hole":
        os.truncate(model / "config.json", HOLE)
    else:
        header = bomb(30 * MIB, b'{"a":{"shape":[],"data_offsets":[0,0],"b":', b"}}")
        (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    done = measured(*argv, cwd=tmp_path)
    assert done.peak_mb < good.peak_mb + ROOM_MB
    one_line(done)


@pytest.mark.scenario("SEC05")
def test_the_largest_real_manifest_and_index_fit_into_their_limits() -> None:
    from verl_slurm.base import bounded

    ranks, tensor_bytes = 4096, 2 << 40
    entry = b'\n  {\n   "leaves": [],\n   "path": "optimizer/rank_4095.bin",\n   "sha256": "",\n   "size": 9\n  },'
    files = 4 * ranks * (len(entry) + 64 + 10)
    leaves = tensor_bytes // (4 * MIB) * (len(b'\n    "",') + 64)
    assert files + leaves < bounded.MANIFEST.num_bytes
    assert 4 * ranks * 6 + tensor_bytes // (4 * MIB) < bounded.MANIFEST.num_values
    # 300 tensors of a model of 7e9, each in as many pieces as there are ranks; two moments of each.
    piece = b'{"at":1234567890,"file":"rank_4095.bin","offset":[8190,0],"shape":[2,11008]},'
    assert 2 * 300 * ranks * len(piece) < bounded.INDEX.num_bytes
    assert 2 * 300 * ranks * 9 < bounded.INDEX.num_values
