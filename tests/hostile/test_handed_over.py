"""Files that somebody hands over: a command takes no more than 300 MB for them than for good ones, waits for no writer,
and ends.

A case of the tables is a command, what is made hostile before it, and how it ends. Each command is a process of its
own, whose peak is measured; what is hostile is made by hand, with no more than a shell and the format's page.
"""

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.builders import cold_tier, write_config
from tests.checkpoint.sealed import save_sealed
from tests.hostile.measured import Measured, measured, measured_program
from tests.hostile.resealed import HOLE, MIB, ROOM_MB, bomb, one_line, put
from tests.journals import append_event
from tests.many_runs import make_run
from tests.processes import ROOT
from verl_slurm.base import bounded
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths

pytestmark = pytest.mark.slow

PATIENCE_S = 300.0
"""For a command that reads a few files on a busy machine."""
CONFIG = "name: demo\nmodel:\n  path: model\n  reward: rule:arithmetic\ndata:\n  root: data\n"
ROW = b'{"prompt": "1+1=", "answer": "2"}\n'


class Place:
    """Everything that a case looks at, all of it good: a run with two checkpoints, and what belongs to a run."""

    def __init__(self, root: Path) -> None:
        self.root, self.run = root, RunPaths(root / "run")
        for folder in ("data", "model", "verl/global_step_1/actor/huggingface"):
            (root / folder).mkdir(parents=True)
        (root / "data/train.jsonl").write_bytes(ROW)
        (root / "model/config.json").write_text('{"model_type": "qwen2"}')
        (root / "model/tokenizer.json").write_text("{}")
        (root / "model/model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
        (root / "config.yaml").write_text(CONFIG)
        (root / "hosts").write_text("a slots=1\nb slots=1\nc slots=1\n")
        (root / "reward.py").write_text("def score(prompts, responses, answers):\n    return []\n")
        (root / "verl/global_step_1/actor/huggingface/tokenizer.json").write_text("{}")
        self.run.root.mkdir(mode=0o700)
        write_config(self.run, name="demo", root=root / "data")
        self.checkpoint = save_sealed(self.run, 1, None)
        self.second = save_sealed(self.run, 2, None)
        self.run.samples.write_bytes(sample_line(1))
        told = make_run(root / "told")
        told.logs.mkdir(exist_ok=True)
        self.log = told.logs / "7_0_log.out"
        self.log.write_text("good\n")

    def words(self, text: str) -> list[str]:
        """`AT` stands for the place, `QUICK` for the quick start's configuration."""
        quick = str(ROOT / "configs/quickstart.yaml")
        return [word.replace("AT", str(self.root)).replace("QUICK", quick) for word in text.split()]

    def ask(self, text: str, module: str = "verl_slurm.cli") -> Measured:
        done = measured_program(module, *self.words(text), cwd=self.root, timeout_s=PATIENCE_S)
        assert "Traceback" not in done.err, done.err
        return done


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


_GOOD: dict[str, Measured] = {}


@pytest.fixture
def good(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Measured]:
    """What a command does where all is good; asked once."""

    def ask(text: str, module: str = "verl_slurm.cli") -> Measured:
        if text not in _GOOD:
            _GOOD[text] = Place(tmp_path_factory.mktemp("good")).ask(text, module)
        return _GOOD[text]

    return ask


@dataclass(frozen=True)
class Case:
    """`code`: "refused": not 0, and one line says why; "any": that it ends is enough."""

    command: str
    spoil: Callable[[Place], object]
    code: int | str = "refused"
    said: str = ""
    module: str = "verl_slurm.cli"


def hole(path: Path, size: int = HOLE) -> None:
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    os.truncate(path, size)


def beyond_all_limits(path: Path) -> None:
    """A record of a fingerprint may have as many bytes as other holes here."""
    hole(path, HOLE + 1)


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)


def sample_line(step: int) -> bytes:
    return b'{"time":"","run":"0123456789abcdef","attempt":0,"step":%d,"responses":0,"samples":[]}\n' % step


def wide_samples() -> bytes:
    text = '{"sample_id":0,"prompt":"%s","response":"","answer":"","reward":0,"response_tokens":0}'
    line = '{"time":"","run":"0123456789abcdef","attempt":0,"step":%d,"responses":0,"samples":[%s]}\n'
    wide = text % ("a" * 3 * MIB + "\N{PARTY POPPER}")
    return "".join(line % (number, wide) for number in range(1, 6)).encode()


def zip_directories(place: Place, num_bytes: int) -> None:
    record = struct.Struct("<4s6H3I5H2I")
    directory = b"".join(
        record.pack(b"PK\1\2", 0, 0, 8, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0) + b"a/%06x" % number
        for number in range(num_bytes // 54)
    )
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0, 0, len(directory), 2, 0)
    for name in ("data.pt", "data_1.pt", "data_2.pt"):
        (place.root / "verl/global_step_1" / name).write_bytes(b"PK" + directory + end)


def in_checkpoint(name: str, data: Callable[[], bytes | None]) -> Callable[[Place], object]:
    return lambda place: put(place.checkpoint, name, data())


def in_manifest(before: bytes) -> Callable[[Place], object]:
    """This at the beginning of a manifest's object."""

    def spoil(place: Place) -> None:
        path = place.checkpoint / "manifest.json"
        path.write_bytes(before + path.read_bytes().lstrip()[1:])

    return spoil


def in_place_of(name: str, make: Callable[[Path], object]) -> Callable[[Place], object]:
    def spoil(place: Place) -> None:
        path = place.root / name
        make(path)
        if path.is_file():
            path.chmod(0o600)

    return spoil


def holds(data: Callable[[], bytes]) -> Callable[[Path], object]:
    return lambda path: path.unlink(missing_ok=True) or path.write_bytes(data())


def first_row(name: str, content: Callable[[], bytes]) -> Callable[[Place], object]:
    def spoil(place: Place) -> None:
        (place.root / "data/train.jsonl").unlink()
        (place.root / "data" / name).write_bytes(content())

    return spoil


def no_rows_but_a_fifo(place: Place) -> None:
    (place.root / "data/train.jsonl").unlink()
    fifo(place.root / "data/state.json")
    (place.root / "data/a.arrow").touch()


def link_to_zero(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


SUBMIT = "submit AT/config.yaml --dry-run --cluster local"
QUICK = "submit QUICK data.root=AT/data --dry-run --cluster local"
REWARD = "update-reward --checkpoint AT/run --new-model python:AT/reward.py:score"
PIECE = b'{"at":0,"file":"rank_0000.bin","offset":[0],"shape":[0]}'
MANY_PIECES = b'{"format":1,"tensors":{"a":{"dtype":"int8","pieces":[%b],"shape":[0]}}}'
SHAPE = b'{"tensors":{"a":{"dtype":"int8","pieces":[],"shape":[' + b"1000," * (6 * MIB) + b"1]}}}"
EVENT = lambda: bomb(40 * MIB, b'{"event":"started","time":', b"}\n")  # noqa: E731

HOLES = {
    name: Case("inspect AT/run/checkpoints/step_000001", in_checkpoint(name, lambda: None))
    for name in (
        "metadata.json",
        "orchestration.json",
        "scheduler.json",
        "schema_version.json",
        "config.yaml",
    )
} | {
    # Of another rank's state, only that it cannot be read is said.
    "runtime_state": Case(
        "inspect AT/run/checkpoints/step_000001",
        in_checkpoint("runtime_state.rank_0000.msgpack.zst", lambda: None),
        code=0,
    ),
    "one of two": Case(
        "inspect AT/run/checkpoints/step_000001 AT/run/checkpoints/step_000002",
        lambda place: put(place.second, "metadata.json", None),
        said="at most",
    ),
}

SWELLING = {
    **{
        f"manifest for {command}": Case(
            f"{command} AT/run" + ("" if command == "list" else "/checkpoints/step_000001"),
            lambda place: in_manifest(bomb(20 * MIB, b'{"a":', b","))(place),
            code="any",
        )
        for command in ("inspect", "verify", "list")
    },
    **{
        f"{name} {number}": Case("inspect AT/run/checkpoints/step_000001", in_checkpoint(name, data))
        for number, (name, data) in enumerate(
            [
                ("metadata.json", lambda: bomb(20 * MIB, b'{"history":', b"}")),
                ("orchestration.json", lambda: bomb(32 * MIB, b'{"data_files":', b"}")),
                ("scheduler.json", lambda: bomb(20 * MIB, b'{"actor":', b"}")),
                ("schema_version.json", lambda: bomb(20 * MIB, b'{"code_version":', b"}")),
                ("config.yaml", lambda: b"a: [" + b"{}," * 300_000 + b"1]\n"),
                ("actor/index.json", lambda: bomb(30 * MIB, b'{"tensors":{"a":{"dtype":', b"}}}")),
                ("actor/index.json", lambda: SHAPE),
            ]
        )
    },
    "index too large for a look": Case(
        "inspect AT/run/checkpoints/step_000001",
        in_checkpoint("actor/index.json", lambda: MANY_PIECES % b",".join([PIECE] * 620_000)),
        code=0,
        said="not listed",
    ),
    **{
        f"key twice {number}": Case(
            "verify AT/run/checkpoints/step_000001", in_manifest(doubled), "fails", "twice"
        )
        for number, doubled in enumerate(
            [b'{"step":9,', b'{"st\\u0065p":9,', b'{"topology":{"dp":1,"dp":2},']
        )
    },
    "json that adopt looks at": Case(
        "adopt AT/verl --dry-run",
        lambda place: [
            (place.root / f"verl/global_step_1/actor/huggingface/{number}.json").write_bytes(bomb(32 * MIB))
            for number in range(3)
        ],
        code="any",
    ),
    "directory of a zip within": Case(
        "adopt AT/verl --dry-run", lambda p: zip_directories(p, 15 * MIB), "any"
    ),
    "directory of a zip beyond": Case(
        "adopt AT/verl --dry-run", lambda p: zip_directories(p, 32 * MIB), "any"
    ),
    **{
        f"{name} for {command.split()[0]}, {what}": Case(
            command, in_place_of(f"run/{name}", beyond_all_limits if what == "hole" else holds(EVENT)), "any"
        )
        for name, command in (
            ("status.json", "status AT/run"),
            ("events.jsonl", "status AT/run"),
            ("events.jsonl", "list AT/run/.."),
            ("steps.jsonl", "status AT/run --steps 9"),
            ("steps.jsonl", "report AT/run --json"),
            ("run.yaml", "status AT/run"),
            (".dataset_fingerprint", "fingerprint AT/run"),
        )
        for what in ("hole", "bomb")
    },
    **{
        f"very short_lines {line!r}": Case(
            "status AT/run",
            in_place_of("run/events.jsonl", holds(lambda line=line: line * (32 * MIB // len(line)))),
            "any",
        )
        for line in (b"ab\n", b"\n", b'{"event":""}\n')
    },
    "model config.json": Case(
        SUBMIT,
        in_place_of("model/config.json", holds(lambda: bomb(30 * MIB, b'{"model_type":"qwen2","a":', b"}"))),
    ),
    "model config.json, hole": Case(SUBMIT, in_place_of("model/config.json", hole)),
    "safetensors": Case(
        SUBMIT,
        in_place_of(
            "model/model.safetensors",
            holds(
                lambda: (
                    struct.pack(
                        "<Q",
                        len(header := bomb(30 * MIB, b'{"a":{"shape":[],"data_offsets":[0,0],"b":', b"}}")),
                    )
                    + header
                )
            ),
        ),
    ),
    "120,000 samples": Case(
        "samples AT/run",
        in_place_of("run/samples.jsonl", holds(lambda: b"".join(map(sample_line, range(1, 120_001))))),
        code=0,
        said="120000",
    ),
    "samples, hole": Case("samples AT/run", in_place_of("run/samples.jsonl", hole), "any"),
    "samples, bomb": Case(
        "samples AT/run",
        in_place_of("run/samples.jsonl", holds(lambda: bomb(16 * MIB, b'{"a":', b"}\n"))),
        "any",
    ),
    "samples, text": Case("samples AT/run", in_place_of("run/samples.jsonl", holds(wide_samples)), "any"),
    "reward, hole": Case(REWARD, in_place_of("reward.py", hole)),
    "reward, many lines": Case(REWARD, in_place_of("reward.py", holds(lambda: b"a\n" * (20 * MIB // 2)))),
    "reward, lines": Case(REWARD, in_place_of("reward.py", holds(lambda: b"a\n" * (127 << 10)))),
    "first row, gigabytes": Case(
        SUBMIT, in_place_of("data/train.jsonl", lambda path: os.truncate(path, 3 << 30))
    ),
    "first row, bomb": Case(
        SUBMIT, first_row("train.jsonl", lambda: bomb(8 * MIB - 64, b'{"prompt":', b"}\n"))
    ),
    "first row, array": Case(
        SUBMIT, first_row("train.json", lambda: b"[" + bomb(8 * MIB, b'{"prompt":', b"}]"))
    ),
    "first row, table": Case(SUBMIT, first_row("train.csv", lambda: b"," * (8 * MIB - 9))),
    **{
        f"hostfile of {word}, {make.__name__}": Case(
            f"{word} --run AT/run --hostfile AT/hosts{more}",
            in_place_of("hosts", make),
            ExitCode.CONFIG,
            "at most" if make is hole else "no regular file",
            "verl_slurm_daemon",
        )
        for word, more in (("lead", ""), ("join", " --host a"))
        for make in (hole, fifo)
    },
}

NO_FILES = {
    "configuration, fifo": Case(SUBMIT, in_place_of("config.yaml", fifo), said="no regular file"),
    "configuration, device": Case(SUBMIT, in_place_of("config.yaml", link_to_zero), said="no regular file"),
    "configuration, hole": Case(
        SUBMIT, in_place_of("config.yaml", lambda path: hole(path, 64 << 30)), said="at most"
    ),
    "chat template": Case(
        f"{QUICK} data.chat_template=AT/chat.jinja", in_place_of("chat.jinja", fifo), said="no regular file"
    ),
    "weights": Case(SUBMIT, in_place_of("model/model-2.safetensors", fifo), said="no regular file"),
    "config of a tokenizer": Case(
        SUBMIT, in_place_of("model/tokenizer_config.json", lambda path: hole(path, 2 << 30)), "any"
    ),
    "data file": Case(SUBMIT, no_rows_but_a_fifo, said="no regular file"),
    "step log": Case("status AT/run", in_place_of("run/steps.jsonl", fifo), "any"),
    "step log, json": Case("status AT/run --json", in_place_of("run/steps.jsonl", fifo), "any"),
    "log": Case("logs AT/told", lambda place: fifo(place.log), ExitCode.NOT_FOUND, "no regular file"),
}


def check(case: Case, place: Place, good: Callable[..., Measured]) -> None:
    before = good(case.command, case.module)
    case.spoil(place)
    done = place.ask(case.command, case.module)
    assert done.peak_mb < before.peak_mb + ROOM_MB, done.err
    assert done.seconds < before.seconds + 150, "a look at data ends itself after 120 s"
    assert ExitCode.USAGE not in (before.code, done.code), done.err
    if case.code == "refused":
        assert done.code not in (0, ExitCode.INTERNAL), done.out
        one_line(done)
    elif case.code == "fails":
        assert done.code != 0
    elif case.code != "any":
        assert done.code == case.code, done.err
    assert case.said in done.out + done.err


@pytest.mark.scenario("SEC04")
@pytest.mark.parametrize("case", HOLES.values(), ids=HOLES.keys())
def test_a_hole_in_a_small_file_is_never_read_into_memory(
    case: Case, place: Place, good: Callable[..., Measured]
) -> None:
    check(case, place, good)


@pytest.mark.scenario("SEC05")
@pytest.mark.parametrize(
    "case",
    # Eight million columns keep a reader of tables at work until it is ended.
    [
        pytest.param(case, id=name, marks=[pytest.mark.long] * name.endswith("table"))
        for name, case in SWELLING.items()
    ],
)
def test_what_swells_in_memory_is_refused_or_passed_over_first(
    case: Case, place: Place, good: Callable[..., Measured]
) -> None:
    check(case, place, good)


@pytest.mark.scenario("SEC17")
@pytest.mark.parametrize("case", NO_FILES.values(), ids=NO_FILES.keys())
def test_what_is_no_file_is_refused_at_once(case: Case, place: Place, good: Callable[..., Measured]) -> None:
    check(case, place, good)


@pytest.mark.scenario("SEC05")
def test_adopt_reads_nothing_of_what_it_refuses_for_its_owner(place: Place) -> None:
    step = place.root / "verl/global_step_1"
    (step / "actor/huggingface/tokenizer.json").write_text("no JSON")
    assert "not JSON" in place.ask("adopt AT/verl --dry-run --json").out
    step.chmod(0o777)
    done = place.ask("adopt AT/verl --dry-run --json")
    assert "may be written by others" in done.out
    assert "not JSON" not in done.out


@pytest.mark.scenario("SEC05")
def test_a_checkpoint_with_thousands_of_files_beside_its_own_is_refused_in_bounded_memory(
    place: Place,
) -> None:
    for number in range(6000):
        os.close(os.open(place.checkpoint / f"{number:04}", os.O_CREAT, 0o600))
    done = measured("verify", place.checkpoint, "--json")
    assert done.code != 0
    (one,) = json.loads(done.out)["checkpoints"]
    assert len(one["problems"]) == 4097
    assert {problem["kind"] for problem in one["problems"]} == {"extra"}
    assert one["problems"][0]["what"] == "1904 more that are not in the manifest"


@pytest.mark.scenario("SEC05")
def test_the_largest_real_manifest_and_index_fit_into_their_limits() -> None:
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


@pytest.mark.scenario("SEC05")
def test_the_last_lines_of_a_log_without_line_ends_are_not_held_in_memory(
    place: Place, good: Callable[..., Measured]
) -> None:
    before = good("logs AT/told -n 400")
    assert (before.code, before.out) == (0, "good\n"), before.err
    with place.log.open("wb") as file:
        for _ in range(400):
            file.write(b"a" * MIB)
    assert place.ask("logs AT/told -n 400").peak_mb < before.peak_mb + ROOM_MB
    assert place.ask("logs AT/told -n 1").out == "a" * MIB + "\n"


@pytest.mark.scenario("SEC05")
def test_neither_a_link_nor_a_job_id_of_the_journal_leads_logs_to_a_file_elsewhere(place: Place) -> None:
    secret = place.root / "secret_0_log.out"
    secret.write_text("mine\n")
    place.log.unlink()
    place.log.symlink_to(secret)
    done = place.ask("logs AT/told")
    assert done.code == ExitCode.NOT_FOUND
    assert "mine" not in done.out
    append_event(RunPaths(place.root / "told"), "submitted", job_id="../../secret", cluster="slurm", host="h")
    done = place.ask("logs AT/told")
    assert done.code == ExitCode.NOT_FOUND, done.out
    assert "mine" not in done.out


@pytest.mark.scenario("SEC05")
def test_a_hash_cache_that_swells_in_memory_is_not_believed(
    place: Place, good: Callable[..., Measured]
) -> None:
    before = good("fingerprint AT/run")
    size = 200 * MIB
    rest = b'{"":[' + b"0," * (size // 2) + b"0]}"
    cache = place.run.root / ".dataset_hashes"
    cache.write_bytes(b"verl-slurm hash cache 2\n" + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
    cache.chmod(0o600)
    done = place.ask("fingerprint AT/run")
    assert done.code == before.code, done.err
    # The file itself is read whole, and its rows once more: a good one may be as large.
    assert done.peak_mb < before.peak_mb + 2 * size / 1e6 + ROOM_MB
    assert "JSON values" in done.err


@pytest.fixture
def archived(place: Place) -> Path:
    """A checkpoint that only a tier has; the directory it lies in there."""
    (place.root / "cold").mkdir(mode=0o700)
    write_config(place.run, name="demo", root=place.root / "data", tiers=(cold_tier(place.root / "cold"),))
    shutil.rmtree(place.second)
    assert place.ask("tiers AT/run --offload").code == 0
    shutil.rmtree(place.checkpoint)
    return next((place.root / "cold").rglob("manifest.json")).parent


@pytest.mark.scenario("SEC05")
@pytest.mark.parametrize("what", ["manifest", "manifest hole", "file", "fifo", "large file"])
def test_a_forged_checkpoint_in_a_tier_is_not_brought_back(place: Place, archived: Path, what: str) -> None:
    before = place.ask("tiers AT/run --fetch-back")
    assert before.code == 0, before.err
    shutil.rmtree(place.checkpoint)
    if what == "manifest":
        (archived / "manifest.json").write_bytes(bomb(40 * MIB, b'{"a":', b"}"))
    elif what == "manifest hole":
        hole(archived / "manifest.json")
    elif what == "fifo":
        fifo(archived / "metadata.json")
    else:
        put(archived, "metadata.json", None)
        if what == "file":
            (archived / "metadata.json").write_bytes(b"{}")
    done = place.ask("tiers AT/run --fetch-back")
    assert done.peak_mb < before.peak_mb + ROOM_MB
    if what == "large file":  # as its manifest says: brought back, and not read into memory then
        done = place.ask("inspect AT/run")
        assert done.peak_mb < before.peak_mb + ROOM_MB
        assert "at most" in one_line(done)
        return
    assert done.code != 0
    one_line(done)
    assert not place.checkpoint.exists()


@pytest.mark.scenario("SEC05")
@pytest.mark.parametrize("words", [["--offload"], ["--offload", "--dry-run"], ["sync"]], ids=" ".join)
def test_a_copy_that_is_handed_back_changes_nothing_in_the_tier_of_its_original(
    place: Place, archived: Path, words: list[str]
) -> None:
    """With the original's run id its keys in the tier are the original's; a manifest says any attempt."""
    before = {path.name: path.read_bytes() for path in archived.rglob("*") if path.is_file()}
    copy = place.root / "copy"
    shutil.copytree(place.run.root, copy)
    there = copy / "checkpoints" / archived.name
    shutil.copytree(archived, there)
    manifest = json.loads((there / "manifest.json").read_bytes())
    (there / "manifest.json").write_text(json.dumps(manifest | {"attempt": 99}))
    put(there, "actor/rank_0000.bin", b"other weights")
    for path in there.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    if words == ["sync"]:  # as the lead starts it
        done = measured_program("verl_slurm.checkpoint.tiers", "sync", "--run", copy)
        assert done.err.startswith("a copy, or a run that was moved")
    else:
        done = measured("tiers", *words, copy)
        assert "a copy, or a run that was moved" in one_line(done)
    assert done.code == ExitCode.CONFIG, done.err
    assert done.err.count("\n") == 1
    assert str(place.run.root) in done.err
    assert " link" not in done.err, "a run directory that is one is refused"
    assert {path.name: path.read_bytes() for path in archived.rglob("*") if path.is_file()} == before
    assert measured("tiers", place.run.root, "--offload").code == 0


@pytest.mark.scenario("SEC05")
def test_a_file_that_is_exchanged_while_inspect_looks_is_refused_or_shown_whole(
    place: Place, good: Callable[..., Measured]
) -> None:
    command = "inspect AT/run/checkpoints/step_000001"
    path, other = place.checkpoint / "metadata.json", place.checkpoint.parent / "other"
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
            done = place.ask(command)
            assert done.code == 0 or one_line(done)
            assert done.code in (0, ExitCode.CORRUPT), done.err
            assert done.peak_mb < good(command).peak_mb + ROOM_MB
    finally:
        os.close(write)
        os.waitpid(child, 0)


_READ = """
import sys
from pathlib import Path
from verl_slurm.config.schema import DataConfig
from verl_slurm.base.errors import DatasetDrift
from verl_slurm.dataset.prompts.directory import prompts_below
root = Path(sys.argv[1])
try:
    print(list(prompts_below(root, DataConfig(root=str(root)), {"train.jsonl": (int(sys.argv[2]), sys.argv[3])})))
except DatasetDrift as error:
    sys.exit(error.exit_code)
"""


@pytest.mark.scenario("SEC17")
@pytest.mark.parametrize("make", [None, fifo, link_to_zero, lambda path: hole(path, 64 << 30)])
def test_what_came_into_the_place_of_a_data_file_is_drift(
    place: Place, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None] | None
) -> None:
    (place.root / "reader.py").write_text(_READ)
    monkeypatch.setenv("PYTHONPATH", str(place.root))
    if make is not None:
        make(place.root / "data/train.jsonl")
    done = place.ask(f"AT/data {len(ROW)} {hashlib.sha256(ROW).hexdigest()}", "reader")
    assert done.code == (0 if make is None else ExitCode.DATASET_DRIFT), done.err
    assert done.peak_mb < ROOM_MB
