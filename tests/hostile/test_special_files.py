"""A FIFO, a device or a hole where a file is opened by its name: nothing waits for a writer or fills its memory."""

import hashlib
import json
import os
import struct
from pathlib import Path

import pytest

from tests.builders import write_config
from tests.harness import ROOT
from tests.hostile.measured import Measured, measured_program
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths

pytestmark = [pytest.mark.scenario("SEC17"), pytest.mark.slow]

QUICK = ROOT / "configs/quickstart.yaml"
ROOM_MB = 300


def command(*words: object, module: str = "verl_slurm.cli") -> Measured:
    done = measured_program(module, *words, timeout_s=60)
    assert done.peak_mb < ROOM_MB
    assert "Traceback" not in done.err, done.err
    return done


def submit(*words: object) -> str:
    """What is said of a dry run that must be refused, in one line."""
    done = command("submit", *words, "--dry-run", "--cluster", "local")
    assert done.code not in (0, ExitCode.INTERNAL), done.out
    (line,) = [line for line in done.err.splitlines() if line.startswith("verl-slurm: ")]
    return line


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """As far as `submit` looks at one."""
    model = tmp_path / "model"
    model.mkdir()
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "tokenizer.json").write_text("{}")
    return model


def test_a_configuration_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.yaml")
    assert "no regular file" in submit(tmp_path / "run.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    assert "no regular file" in submit(tmp_path / "zero.yaml")
    (tmp_path / "hole.yaml").touch()
    os.truncate(tmp_path / "hole.yaml", 64 << 30)
    assert "at most" in submit(tmp_path / "hole.yaml")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    root.mkdir()
    (root / "a.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    return root


def test_a_chat_template_that_is_no_file_is_refused(tmp_path: Path, root: Path) -> None:
    template = tmp_path / "chat.jinja"
    os.mkfifo(template)
    assert "no regular file" in submit(QUICK, f"data.chat_template={template}", f"data.root={root}")


def test_weights_that_are_no_file_are_refused(model: Path) -> None:
    os.mkfifo(model / "model-2.safetensors")
    assert "no regular file" in submit(QUICK, f"model.path={model}")


def test_the_config_of_a_tokenizer_is_read_in_bounded_memory(model: Path, root: Path) -> None:
    (model / "tokenizer_config.json").touch()
    os.truncate(model / "tokenizer_config.json", 2 << 30)
    command("submit", QUICK, f"model.path={model}", f"data.root={root}", "--dry-run", "--cluster", "local")


def test_a_data_file_that_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    os.mkfifo(tmp_path / "data" / "state.json")
    (tmp_path / "data" / "a.arrow").touch()
    assert "no regular file" in submit(QUICK, f"data.root={tmp_path / 'data'}")


@pytest.mark.parametrize("words", [["status"], ["status", "--json"]])
def test_a_run_whose_step_log_is_a_fifo_is_told_of(tmp_path: Path, words: list[str]) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir(mode=0o700)
    write_config(paths, name="demo")
    job = {"time": "2026-11-22T00:00:00+00:00", "event": "submitted", "job_id": "local-1", "cluster": "local"}
    end = job | {"event": "ended", "exit_code": 0}
    paths.events.write_text(f"{json.dumps(job)}\n{json.dumps(end)}\n")
    os.mkfifo(paths.steps)
    command(*words, paths.root)


_READ = """
import sys
from pathlib import Path
from verl_slurm.config.schema import DataConfig
from verl_slurm.base.errors import DatasetDrift
from verl_slurm.dataset.prompts.directory import prompts_below
root = Path(sys.argv[1])
try:
    print(list(prompts_below(root, DataConfig(root=str(root)), {"a.jsonl": (int(sys.argv[2]), sys.argv[3])})))
except DatasetDrift as error:
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize("what", ["good", "fifo", "device", "hole"])
def test_what_came_into_the_place_of_a_data_file_is_drift(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    (tmp_path / "reader.py").write_text(_READ)
    root = tmp_path / "data"
    root.mkdir()
    file, data = root / "a.jsonl", b'{"prompt": "a", "answer": "b"}\n'
    if what == "good":
        file.write_bytes(data)
    elif what == "fifo":
        os.mkfifo(file)
    elif what == "device":
        file.symlink_to("/dev/zero")
    else:
        file.touch()
        os.truncate(file, 64 << 30)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = command(root, len(data), hashlib.sha256(data).hexdigest(), module="reader")
    assert done.code == (0 if what == "good" else ExitCode.DATASET_DRIFT), done.err
