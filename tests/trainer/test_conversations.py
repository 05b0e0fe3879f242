"""A run on conversations, as verl's users have them, and what it says: `verl-slurm samples`."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local_runs import finish, lead, prepared
from tests.processes import captured
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.cli.__main__ import main

pytestmark = [pytest.mark.torch, pytest.mark.long]
pq = pytest.importorskip("pyarrow.parquet")

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'][0] }}:{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
REWARD = """
def score(prompts, responses, answers):
    assert all(prompt.endswith("=\\x1b[2J<|im_start|>") for prompt in prompts), prompts
    assert all(prompt.startswith("<|im_start|>s:Add.<|im_start|>u:") for prompt in prompts), prompts
    return [len(response) / 100 + float(answer) for response, answer in zip(responses, answers)]
"""
Samples = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Encrypted, ended after two steps."""
    import pyarrow

    place = tmp_path_factory.mktemp("chat")
    rows = [
        {
            "prompt": [
                {"role": "system", "content": "Add.", "name": None},
                {"role": "user", "content": f"{n}+1=\x1b[2J", "name": "eve" if n == 3 else None},
            ],
            "reward_model": {"style": "rule", "ground_truth": n % 2},
        }
        for n in range(40)
    ]
    (place / "data").mkdir()
    pq.write_table(pyarrow.Table.from_pylist(rows), place / "data" / "train.parquet")
    (place / "chat.jinja").write_text(TEMPLATE)
    (place / "reward.py").write_text(REWARD)
    assert main(["init", "--key", str(place / "key")]) == ExitCode.OK
    paths = prepared(
        place / "run",
        f"data.root={place}/data",
        f"data.chat_template={place}/chat.jinja",
        "data.answer_key=reward_model.ground_truth",
        "data.max_prompt_tokens=40",
        f"model.reward=python:{place}/reward.py:score",
        f"checkpoint.encryption={{key_file: {place}/key}}",
        "rollout.keep_samples=10",
    )
    process = lead(paths)
    try:
        assert finish(process) == 0
    finally:
        process.kill()
    return paths


@pytest.fixture
def samples(run: RunPaths, capfd: pytest.CaptureFixture[str]) -> Samples:
    def ask(*words: str, place: Path = run.root) -> tuple[int, str]:
        capfd.readouterr()
        code = main(["samples", str(place), *words])
        out, err = capfd.readouterr()
        assert "\x1b" not in out + err
        return code, out + err

    return ask


@pytest.mark.scenario("USE08")
@pytest.mark.variant
def test_a_run_trains_on_conversations_by_a_chat_template(run: RunPaths, samples: Samples) -> None:
    code, text = samples("--json", "--limit", "100")
    assert code == ExitCode.OK
    rows = [json.loads(line) for line in text.splitlines()]
    assert len(rows) == 10
    expected = re.compile(r"<\|im_start\|>s:Add\.<\|im_start\|>u:\d+\+1=\x1b\[2J<\|im_start\|>")
    assert all(expected.fullmatch(row["prompt"]) for row in rows)
    assert {row["answer"] for row in rows} <= {"0", "1"}


def test_an_export_renders_as_the_run_did_though_the_template_file_has_changed(
    run: RunPaths, samples: Samples, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    (run.root.parent / "chat.jinja").write_text("{{ messages[0].content }}")
    assert main(["export", str(run.root), "--to", "hf", "--out", str(tmp_path / "out")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "out"), local_files_only=True)
    _, text = samples("--json", "--limit", "1")
    prompt = json.loads(text)["prompt"]
    number = re.findall(r"\d+", prompt)[0]
    talk = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": f"{number}+1=\x1b[2J"},
    ]
    assert tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) == prompt


@pytest.mark.scenario("USE08")
def test_samples_shows_the_best_and_the_worst_of_a_step(run: RunPaths, samples: Samples) -> None:
    code, text = samples("--limit", "3")
    assert code == ExitCode.OK
    assert "samples of steps 1 to 2 are kept" in text
    assert text.count("  prompt ") == text.count("  response ") == 3
    rewards = [float(word) for word in re.findall(r"^reward (\S+)", text, re.MULTILINE)]
    assert rewards == sorted(rewards, reverse=True)
    assert rewards[0] > 1 > rewards[-1]
    _, lines = samples("--limit", "2", "--step", "1", "--json")
    best, worst = map(json.loads, lines.splitlines())
    assert best["reward"] > worst["reward"]
    assert best["step"] == 1


@pytest.mark.scenario("USE08")
def test_samples_of_an_encrypted_run_need_its_key(run: RunPaths, samples: Samples) -> None:
    kept = run.samples.read_bytes()
    assert b"sealed" in kept
    assert b"im_start" not in kept
    assert run.samples.stat().st_mode & 0o77 == 0
    key = run.root.parent / "key"
    key.rename(key.with_name("gone"))
    try:
        assert samples()[0] == ExitCode.KEY
        assert samples("--key-file", str(key.with_name("gone")))[0] == ExitCode.OK
    finally:
        key.with_name("gone").rename(key)


@pytest.mark.scenario("USE08")
def test_samples_that_are_not_there_are_one_line(run: RunPaths, samples: Samples, tmp_path: Path) -> None:
    code, text = samples("--step", "9")
    assert code == ExitCode.NOT_FOUND
    assert "found step 9, expected steps 1 to 2" in text
    guest = tmp_path / "guest.yaml"
    guest.write_text(f"trainer: {{backend: command, command: [-m, json.tool]}}\nrun_dir: {tmp_path}/guest\n")
    assert main(["submit", str(guest), "--prepare-only"]) == ExitCode.OK
    for place, found in (
        (prepared(tmp_path / "new").root, "no step that has ended since samples are kept"),
        (prepared(tmp_path / "none", "rollout.keep_samples=0").root, "rollout.keep_samples: 0"),
        (tmp_path / "guest", "trainer.backend: command"),
    ):
        code, text = samples(place=place)
        assert (code, len(text.splitlines())) == (ExitCode.NOT_FOUND, 1)
        assert found in text


@pytest.mark.scenario("USE08")
def test_samples_of_a_living_run_are_read_without_torch(tmp_path: Path) -> None:
    """What a rank writes while a reader looks: whole lines count, and old steps go when the file is full."""
    from verl_slurm.runtime_state import samples as store

    paths = prepared(tmp_path / "run")
    sample = store.Sample(
        sample_id=1,
        prompt="\x9b31mp",
        response=store.clipped("r\nq" * 4000),
        answer="a",
        reward=0.5,
        response_tokens=3,
    )
    for step in range(1, 2200):
        store.append_samples(paths, 1, step, 64, [sample, sample])
    with paths.samples.open("ab") as file:
        file.write(b'{"time": "half a li')
    probe = "import sys; from verl_slurm.cli.__main__ import main; code = main(sys.argv[1:]);"
    probe += "print('torch' in sys.modules, 'transformers' in sys.modules); sys.exit(code)"
    done = captured([sys.executable, "-c", probe, "samples", str(paths.root)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("False False\n")
    assert "step   2199, by attempt 1" in done.stdout
    first = int(re.search(r"samples of steps (\d+) to 2199", done.stdout)[1])  # type: ignore[index]
    assert 1 < first < 2000
    assert "\x9b" not in done.stdout
    assert sum(path.stat().st_size for path in (paths.samples, paths.old_samples)) < 17 << 20
    # An attempt that went back: what was done beyond it is no part of the run.
    store.append_samples(paths, 2, 2100, 64, [sample])
    assert max(store.read_samples(paths)) == 2100
    os.truncate(paths.samples, 0)
    assert max(store.read_samples(paths)) < 2100
