"""YAML 1.2 with anchors and merge keys: what a file says, where, and what it may cost."""

import json
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tests.lanes import with_variants
from verl_slurm.base.errors import ConfigError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.config.load import parse_config
from verl_slurm.config.strict_yaml import dump, parse

GOLDEN = Path(__file__).parent / "golden"


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        parse(text.encode(), "my.yaml")
    assert refused.value.exit_code == ExitCode.CONFIG
    return refused.value.one_line()


@pytest.mark.parametrize("name", ["run_own", "run_verl"])
def test_a_run_yaml_of_the_first_release_is_read_as_it_was_then(name: str) -> None:
    """The .yaml was written, and the .json read from it, by the code of commit d841de5, with PyYAML."""
    raw = (GOLDEN / f"{name}.yaml").read_bytes()
    data = parse(raw, "run.yaml").data
    assert data == json.loads((GOLDEN / f"{name}.json").read_text())
    assert parse(dump(data), "again").data == data


def test_an_alias_is_a_copy_and_a_merge_key_gives_what_is_not_said() -> None:
    text = """
base: &base {steps: 3, lr: 1e-5, names: [a, b]}
more: &more {steps: 4, seed: 7}
copy: *base
merged:
  lr: 2.5
  <<: [*base, *more]
scalar: &word no
again: *word
"""
    data, lines = parse(text.encode(), "my.yaml")
    assert data["copy"] == data["base"] == {"steps": 3, "lr": 1e-5, "names": ["a", "b"]}
    assert data["copy"] is not data["base"], "an override of one must not change the other"
    assert data["merged"] == {"steps": 3, "seed": 7, "lr": 2.5, "names": ["a", "b"]}
    assert data["again"] == "no"
    assert (lines["merged.steps"], lines["merged.seed"], lines["merged.lr"]) == (2, 3, 6)


def test_an_override_changes_one_use_of_an_anchor() -> None:
    text = b"trainer: {backend: verl}\nverl:\n  a: &x {lr: 1.0}\n  b: {<<: *x, n: 2}\n"
    config = parse_config(text, "my.yaml", ["verl.b.lr=3.0"])
    assert config.verl == {"a.lr": 1.0, "b.lr": 3.0, "b.n": 2}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: *b\n", "my.yaml:1:4 (found undefined alias 'b')"),
        ("a: &x 1\nb: &x 2\n", "the same anchor twice: my.yaml:2:4: &x (found first in line 1)"),
        ("x: &x {}\nb:\n  <<: *x\n  <<: *x\n", "the same key twice: my.yaml:4: b.<< (found first in line 3)"),
        ("a: &x 1\nb:\n  <<: *x\n", "`<<` merges mappings only: my.yaml:1:4"),
        ("a: {b: 1,\n  b: 2}\n", "the same key twice: my.yaml:2: a.b (found first in line 1)"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n  d: 1\n  d: 2\n", "my.yaml:5: c.d (found first in line 4)"),
        ("a: !!int 3\n", "tags are not allowed: my.yaml:1:4 (found tag:yaml.org,2002:int)"),
        ("a: ! 3\n", "tags are not allowed: my.yaml:1:4 (found !)"),
        ("a: &x [*x]\n", "nested too deeply"),
        ("a: &x {<<: *x}\n", "nested too deeply"),
        ("&x\n<<: [*x, *x, *x]\n", "nested too deeply"),
        ("a: 1\n--- {}\n", "not valid YAML: my.yaml:2:1 (found another document)"),
        ("? *x\n: 1\n", "undefined alias"),
        ('a: "\\ud83d\\ude00"\n', "text that is no Unicode: my.yaml:1:4"),
        ("a: &x [1]\n*x : 2\n", "a key must be a word: my.yaml:1"),
    ],
)
def test_what_is_refused_is_said_with_its_line(text: str, part: str) -> None:
    line = refusal(text)
    assert part in line
    assert "\n" not in line


def _tower(first: str, level: str, width: int) -> str:
    """Anchors a to g, each of which uses the one before it `width` times."""
    lines = [f"a: &a {first}"]
    for above, below in zip("bcdefg", "abcdef", strict=True):
        lines.append(f"{above}: &{above} {level.format(', '.join([f'*{below}'] * width))}")
    return "\n".join(lines)


BOMBS = {
    "lists of lists": _tower("[x, x, x]", "[{}]", 1000),
    "merges": _tower("{x: 1}", "{{<<: [{}]}}", 1000),
    "merges of nothing": _tower("{}", "{{<<: [{}]}}", 1000),
    "long text": f"a: &a {'x' * 300_000}\nb: [{', '.join(['*a'] * 9000)}]",
    "long keys": "a: &a {" + "x" * 1000 + ": 1}\n" + "".join(f"b{n}: *a\n" for n in range(9000)),
}


@pytest.mark.scenario("M09")
@pytest.mark.parametrize("text", with_variants(*BOMBS.values()), ids=BOMBS.keys())
def test_aliases_that_expand_to_too_much_are_refused_at_once(text: str) -> None:
    began = time.process_time()
    line = refusal(text)
    assert time.process_time() - began < 5, "0.6 s on a busy machine"
    assert "too large: my.yaml (found aliases that expand to more" in line
    tracemalloc.start()
    refusal(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20


def test_an_expanded_value_counts_as_often_as_it_is_used() -> None:
    row = "a: &a [" + ", ".join("1" * 99) + "]\n"
    few = row + "b: [" + ", ".join(["*a"] * 190) + "]\n"
    assert len(parse(few.encode(), "my.yaml").data["b"]) == 190  # type: ignore[arg-type]
    assert "expand" in refusal(few.replace("b: [", "b: [" + "*a, " * 10))


@settings(deadline=None)  # a busy machine is no bug
@given(st.dictionaries(st.text(min_size=1, max_size=9), st.text(max_size=20) | st.floats(allow_nan=False)))
def test_a_dump_reads_the_same(data: dict[str, str | float]) -> None:
    data = {key: value for key, value in data.items() if value not in (float("inf"), float("-inf"))}
    try:
        raw = dump({"a": data})
    except UnicodeEncodeError:
        return  # a lone surrogate
    assert parse(raw, "my.yaml").data == {"a": data}
