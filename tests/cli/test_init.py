"""`init`: up to six questions on a terminal, none elsewhere, and a file that `submit --dry-run` takes."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.terminal import on_a_terminal
from verl_slurm.base.errors import ConfigError, DatasetDrift
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.cli.setup.init import Offer, parse_place
from verl_slurm.config.load import load, load_resolved
from verl_slurm.dataset.fingerprint.data_record import check_dataset
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.facts import PartitionFacts
from verl_slurm.verl.verl_inputs import data_of

Cli = Callable[..., Any]
WITHOUT_SLURM = {"PATH": "/nowhere"}


def dry_run(cli: Cli, file: str, *words: str) -> None:
    result = cli("submit", file, "--dry-run", "--cluster", "local", *words)
    assert result.code == ExitCode.OK, result.err


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Offer:
    """The partition of a cluster that is not here: four nodes of eight GPUs, jobs of at most an hour."""
    facts = PartitionFacts(
        name="gpu",
        state="UP",
        total_nodes=4,
        total_cpus=256,
        max_time_s=3600,
        max_nodes=None,
        grace_s=30,
        preempt_mode="REQUEUE",
        is_default=True,
    )
    conf = {"PreemptType": "preempt/partition_prio", "SLURM_VERSION": "24.11.5"}
    found = Offer(facts=facts, gpus=8, conf=conf)
    monkeypatch.setattr("verl_slurm.cli.setup.init.find_offers", lambda *_: [found])
    return found


@pytest.mark.slow
def test_five_answers_make_a_file_that_the_dry_run_takes(workplace: Path, cli: Cli) -> None:
    (workplace / "data" / "train.jsonl").write_text('{"question": "1+1=", "solution": "2"}\n')
    # A wrong answer is told, and asked for again; Enter takes what was found here.
    typed = "ppo\nmodle\n\n\n\n2by2\n1x2\n"
    shown = on_a_terminal("init", "first.yaml", typed=typed, cwd=workplace, env=WITHOUT_SLURM)
    assert shown.code == ExitCode.OK, shown.text
    assert "no such model directory" in shown.text
    assert "set model.path" not in shown.text, "a key of a file that is not there yet"
    assert "not a place (found 2by2" in shown.text
    assert "\x1b" not in shown.text
    numbers = [word for word in "12345" if f"{word}. " in shown.text]
    assert len(numbers) == 5
    config = load(workplace / "first.yaml")
    assert (config.train.algorithm, config.model.path, config.data.root) == ("ppo", "model", "data")
    assert (config.data.prompt_key, config.data.answer_key) == ("question", "solution")
    assert (workplace / "reward.py").is_file()
    text = (workplace / "first.yaml").read_text()
    assert "CHANGE" not in text
    assert text.count("#") > 15, "it is commented"
    dry_run(cli, "first.yaml")


@pytest.mark.slow
def test_answers_in_a_column_of_an_unknown_name_are_asked_for(workplace: Path, cli: Cli) -> None:
    (workplace / "data" / "train.jsonl").write_text('{"question": "1+1=", "gold": "2", "level": 3}\n')
    typed = "grpo\nmodel\n\ngolf\ngold\n\n1x1\n"
    shown = on_a_terminal("init", "first.yaml", typed=typed, cwd=workplace, env=WITHOUT_SLURM)
    assert shown.code == ExitCode.OK, shown.text
    assert "known to hold answers: keys question, gold, level" in shown.text
    assert "no text under 'golf'" in shown.text
    assert load(workplace / "first.yaml").data.answer_key == "gold"
    assert "CHANGE" not in (workplace / "first.yaml").read_text()


def test_without_a_terminal_init_says_that_it_found_no_answers(
    workplace: Path, cli: Cli, without_slurm: None
) -> None:
    (workplace / "data" / "train.jsonl").write_text('{"question": "1+1=", "gold": "2"}\n')
    words = ("--model", "model", "--data", "data")
    result = cli("init", "first.yaml", *words)
    assert "the data has keys question, gold; answer_key is null" in result.out
    assert "CHANGE: which of the keys question, gold" in (workplace / "first.yaml").read_text()
    # Every text contains an empty answer, so a first reward that compares with it would be 1 always.
    scope: dict[str, Any] = {}
    exec((workplace / "reward.py").read_text(), scope)
    with pytest.raises(ValueError, match="set data.answer_key"):
        scope["score"](["1+1="], ["3"], [""])
    assert cli("submit", "first.yaml", "--dry-run", "--cluster", "local").err.count("answer_key is null") == 1
    assert cli("init", "second.yaml", *words, "--answers", "gold").code == ExitCode.OK
    assert load(workplace / "second.yaml").data.answer_key == "gold"


@pytest.mark.slow
def test_a_file_of_data_beside_the_configuration_trains_whatever_else_changes_there(
    workplace: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workplace / "data" / "train.jsonl").rename(workplace / "train.jsonl")
    with monkeypatch.context() as without_slurm:
        without_slurm.setenv("PATH", WITHOUT_SLURM["PATH"])
        result = cli("init", "my.yaml", "--model", "model", "--data", "train.jsonl")
    assert result.code == ExitCode.OK, result.err
    words = ("my.yaml", "name=demo-quick", "--cluster", "local", "--wait")
    for _ in range(2):
        result = cli("submit", *words)
        assert result.code == ExitCode.OK, result.err
        run = RunPaths(workplace / "runs" / "demo-quick")
        place = data_of(load_resolved(run.run_yaml))
        assert place is not None
        check_dataset(run, place)  # as the lead does before it starts ranks; the one of this test does not
        (workplace / "my.yaml").write_text((workplace / "my.yaml").read_text() + "# a remark\n")
        (workplace / ".venv").mkdir(exist_ok=True)
    (workplace / "train.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    with pytest.raises(DatasetDrift, match=r"1 changed \(train\.jsonl\)"):
        check_dataset(run, place)


@pytest.mark.slow
def test_an_end_of_the_input_leaves_nothing(workplace: Path, nothing_left: None) -> None:
    shown = on_a_terminal("init", "first.yaml", typed="grpo\n\x04", cwd=workplace, env=WITHOUT_SLURM)
    assert shown.code == ExitCode.INTERRUPTED


@pytest.mark.parametrize("kind", ["ppo", "grpo", "loop"])
def test_options_answer_the_questions(workplace: Path, cli: Cli, without_slurm: None, kind: str) -> None:
    (workplace / "train.py").write_text("import verl_slurm\n")
    (workplace / "reward.py").write_text("def score(prompts, responses, answers): ...\n")
    words = ("--program", "train.py --lr 1e-4") if kind == "loop" else ("--model", "model")
    result = cli("init", "first.yaml", "--for", kind, *words, "--nodes", 2, "--ranks", 3)
    assert result.code == ExitCode.OK, result.err
    assert "CHANGE" not in (workplace / "first.yaml").read_text()
    assert "first one" not in result.out, "a reward that is there stays"
    shape = load(workplace / "first.yaml").distributed
    assert (shape.nodes, shape.dp_size) == (2, 6)
    dry_run(cli, "first.yaml", "distributed.nodes=1")


def test_what_an_option_names_is_checked_before_anything_is_written(
    workplace: Path, cli: Cli, without_slurm: None
) -> None:
    (workplace / "model" / "tokenizer.txt").touch()
    for words, code in (
        (("--model", "modle"), ExitCode.DATA),
        (("--model", "builtin:tinyy"), ExitCode.CONFIG),
        (("--for", "verl", "--model", "builtin:tiny"), ExitCode.DATA),
        (("--model", "model", "--data", "dat"), ExitCode.DATA),
        (("--model", "model", "--data", "builtin:sums"), ExitCode.CONFIG),
        (("--for", "verl", "--model", "model", "--data", "model/tokenizer.txt"), ExitCode.DATA),
        (("--model", "m" * 300), ExitCode.PERMISSION),
        (("--model", "model", "--reward", "rule:nosuch"), ExitCode.CONFIG),
        (("--for", "loop", "--program", "nosuch.py"), ExitCode.NOT_FOUND),
        (("--for", "loop", "--program", "train.py 'x"), ExitCode.CONFIG),
    ):
        result = cli("init", "first.yaml", *words)
        assert (result.code, bool(result.error)) == (code, True)
        assert not (workplace / "first.yaml").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("--for", "loop", "--model", "model"),
        ("--for", "verl", "--reward", "rule:arithmetic"),
        ("--program", "train.py"),
        ("--ask",),  # and nothing to ask on
    ],
)
def test_an_option_that_cannot_be_heeded_is_a_usage_error(
    workplace: Path, cli: Cli, words: tuple[str, ...]
) -> None:
    assert cli("init", "first.yaml", *words).code == ExitCode.USAGE
    assert not Path("first.yaml").exists()


@pytest.mark.parametrize("file", ["/proc/x.yaml", "x" * 300, f"{'x' * 300}/my.yaml"])
def test_a_place_that_takes_no_file_is_refused_in_one_line(workplace: Path, cli: Cli, file: str) -> None:
    result = cli("init", file, "--no-ask")
    assert result.code == ExitCode.PERMISSION
    assert result.error


@pytest.mark.parametrize("begun", [b"#", b'"""'], ids=["configuration", "reward"])
def test_a_full_file_system_leaves_neither_file(
    workplace: Path,
    cli: Cli,
    without_slurm: None,
    nothing_left: None,
    monkeypatch: pytest.MonkeyPatch,
    begun: bytes,
) -> None:
    write = os.write

    def full(fd: int, data: bytes) -> int:
        if bytes(data).startswith(begun):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    monkeypatch.setattr(os, "write", full)
    result = cli("init", "first.yaml", "--model", "model")
    assert result.code == ExitCode.NO_ROOM
    assert "No space left on device" in result.error


@pytest.mark.parametrize("kind", ["verl", "grpo"])
def test_what_is_found_and_does_not_fit_becomes_a_line_to_fill_in(
    workplace: Path, cli: Cli, without_slurm: None, kind: str
) -> None:
    (workplace / "data" / "train.jsonl").unlink()
    (workplace / "model" / "config.json").unlink()
    (workplace / "models" / "stray").mkdir(parents=True)
    (workplace / "models" / "stray" / "config.json").write_text("{")
    (workplace / "reward.py").write_text("reward = 1\n")
    assert cli("init", "first.yaml", "--for", kind, "--nodes", 2).code == ExitCode.OK
    assert load(workplace / "first.yaml").distributed.nodes == 2
    marked = (workplace / "first.yaml").read_text().count("CHANGE: ")
    # Two data files of verl's and its model; our model, data and reward.
    assert marked == 3


def test_built_ins_get_as_many_tokens_as_the_model_takes(
    workplace: Path, cli: Cli, without_slurm: None
) -> None:
    words = ("--model", "builtin:tiny", "--data", "builtin:arithmetic")
    assert cli("init", "first.yaml", *words).code == ExitCode.OK
    assert "CHANGE" not in (workplace / "first.yaml").read_text()
    config = load(workplace / "first.yaml")
    assert config.data.root == "builtin:arithmetic"
    assert (config.data.max_prompt_tokens, config.rollout.max_new_tokens) == (64, 64), "of 128"


@pytest.mark.parametrize("file", ["-x", "quickstart"])
def test_the_next_steps_can_be_entered_as_printed(
    workplace: Path, cli: Cli, without_slurm: None, file: str
) -> None:
    result = cli("init", "--model", "model", "--", file)
    assert result.code == ExitCode.OK, result.err
    assert f"verl-slurm submit ./{file} --cluster local --dry-run" in result.out
    dry_run(cli, f"./{file}")


def test_a_place_has_the_limits_of_the_options() -> None:
    assert parse_place("10000x1024", []).nodes == 10_000
    for text in ("10001x1", "1x1025", "0x1", "1"):
        with pytest.raises(ConfigError, match="10000x1024"):
            parse_place(text, [])


def test_data_without_a_usual_column_is_refused_with_the_columns_it_has(
    workplace: Path, cli: Cli, without_slurm: None
) -> None:
    (workplace / "data" / "train.jsonl").write_text('{"frage": "1+1=", "antwort": "2"}\n')
    result = cli("init", "first.yaml", "--data", "data")
    assert result.code == ExitCode.DATA
    assert "found keys frage, antwort" in result.error
    (workplace / "data" / "other.json").write_text('[{"messages": "1+1="}]')
    assert cli("init", "first.yaml", "--data", "data/other.json").code == ExitCode.OK, "a file alone"
    data = load(workplace / "first.yaml").data
    assert (data.root, data.files, data.prompt_key) == ("data", "other.json", "messages")
    assert data.answer_key is None


def test_the_cluster_says_partition_gpus_limit_and_warning(workplace: Path, cli: Cli, offer: Offer) -> None:
    result = cli("init", "first.yaml", "--model", "model", "--nodes", 2)
    assert result.code == ExitCode.OK
    assert "submit first.yaml --dry-run" in result.out, "on Slurm, which is here"
    config = load(workplace / "first.yaml")
    assert (config.distributed.dp_size, config.slurm.gpus_per_node, config.slurm.cpus_per_node) == (16, 8, 64)
    assert (config.slurm.partition, config.slurm.time_limit_min) == ("gpu", 60)
    text = (workplace / "first.yaml").read_text()
    assert "# gpu: 4 nodes, 8 GPUs on each, jobs up to 1 h, the default" in text
    assert "# preemption: PreemptMode=REQUEUE, GraceTime 30 s" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", "5"), "4 nodes in it, 5 asked for"),
        (("--ranks", "9"), "a node has fewer GPUs"),
        (("--partition", "cpu"), "no such partition"),
    ],
)
def test_more_than_the_partition_has_is_refused(
    workplace: Path, cli: Cli, offer: Offer, words: tuple[str, str], said: str
) -> None:
    result = cli("init", "first.yaml", "--model", "model", *words)
    assert result.code != ExitCode.OK
    assert said in result.error
    assert not (workplace / "first.yaml").exists()


def test_data_of_verl_is_split_by_its_names(workplace: Path, cli: Cli, offer: Offer) -> None:
    for name in ("train.parquet", "test.parquet"):
        (workplace / "data" / name).write_bytes(b"")
    words = ("--for", "verl", "--model", "Qwen/Qwen3-8B", "--data", "data", "--ranks", 6)
    assert cli("init", "first.yaml", *words).code == ExitCode.OK
    verl = load(workplace / "first.yaml").verl
    assert (verl["data.train_files"], verl["data.val_files"]) == ("data/train.parquet", "data/test.parquet")
    assert verl["actor_rollout_ref.model.path"] == "Qwen/Qwen3-8B"
    assert "CHANGE" not in (workplace / "first.yaml").read_text()
    sizes = {verl["data.train_batch_size"], verl["actor_rollout_ref.actor.ppo_mini_batch_size"]}
    assert sizes == {60}, "a multiple of the ranks"


def test_one_file_for_verl_holds_nothing_out(workplace: Path, cli: Cli, without_slurm: None) -> None:
    words = ("--for", "verl", "--model", "model", "--data", "data/train.jsonl")
    assert cli("init", "first.yaml", *words).code == ExitCode.OK
    marked = [line for line in (workplace / "first.yaml").read_text().splitlines() if "CHANGE: " in line]
    assert len(marked) == 1
    assert "nothing is held out" in marked[0]


@pytest.mark.slurm
def test_the_embedded_cluster_takes_the_file(
    workplace: Path, cli: Cli, cluster: DevCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.env().items():
        monkeypatch.setenv(name, value)
    (workplace / "train.py").write_text("import verl_slurm\n")
    for kind, words in (("grpo", ("--model", "model")), ("loop", ("--program", "train.py"))):
        result = cli("init", f"{kind}.yaml", "--for", kind, *words, "--partition", "preemptible")
        assert result.code == ExitCode.OK, result.err
        assert "GraceTime 30 s" in (workplace / f"{kind}.yaml").read_text()
        result = cli("submit", f"{kind}.yaml", "--dry-run", "--cluster", "slurm", "--json")
        assert result.code == ExitCode.OK, result.err
        assert "#SBATCH --partition=preemptible" in json.loads(result.out)["script"]
