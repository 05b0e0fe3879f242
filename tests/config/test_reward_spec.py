"""What `model.reward` may say, found out without running a line of it."""

import sys
from pathlib import Path

import pytest

from verl_slurm.base.errors import ConfigError, DataError
from verl_slurm.config.reward_spec import RewardSpec, check_function, nearest_form, parse_reward, source_file


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("rule:arithmetic", RewardSpec("rule", "arithmetic")),
        ("classifier:/models/rm", RewardSpec("classifier", "/models/rm")),
        ("python:my.pkg:score", RewardSpec("python", "my.pkg", "score")),
        ("python:/a b/c:d.py:score", RewardSpec("python", "/a b/c:d.py", "score")),
        *((text, None) for text in ("", "rule:", "python:mod", "python:mod:", "python::f", "python:a/b:f")),
        *((text, None) for text in ("python:m:f()", "model:x", "rule:a\nb")),
    ],
)
def test_the_forms_there_are_and_what_is_none_of_them(text: str, spec: RewardSpec | None) -> None:
    assert parse_reward(text) == spec
    assert spec is None or str(spec) == text


def test_a_reward_without_its_kind_is_told_how_to_be_written() -> None:
    assert nearest_form("my.py:score") == "write python:my.py:score"
    assert nearest_form("pkg.my:score") == "write python:pkg.my:score"
    assert nearest_form("python:my.py") == "write python:my.py:FUNCTION"
    assert nearest_form("clasifier:x") == nearest_form("") == ""


def _python(name: str, function: str = "score") -> RewardSpec:
    return RewardSpec("python", name, function)


def test_a_module_is_found_without_importing_its_packages(tmp_path: Path) -> None:
    inner = tmp_path / "vs_outer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "vs_outer" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (inner / "__init__.py").touch()
    (inner / "mine.py").write_text("def score(p, r, a): ...\n")
    found = source_file(_python("vs_outer.inner.mine"), [str(tmp_path)])
    assert found == inner / "mine.py"
    check_function(_python("vs_outer.inner.mine"), found)
    assert not any(name.startswith("vs_outer") for name in sys.modules)


@pytest.mark.parametrize("name", ["no_such_module_of_ours", "os.nosuch", "sys", "/nowhere/reward.py"])
def test_a_module_or_file_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no such reward function"):
        source_file(_python(name))


@pytest.mark.parametrize(
    "source",
    [
        "def score(prompts, responses, answers): ...",
        "def score(p, r, a, *, strict=False, depth=3): ...",
        "def score(*texts): ...",
        "def score(p, r, a, extra=None): ...",
        "try:\n    from fast import score\nexcept ImportError:\n    def score(p, r, a): ...",
        "if True:\n    score = make()",
        "from elsewhere import other as score",
        "class score: ...",
        "def score(prompts, completions, answer):\n    return list(x for x in (yield_ for yield_ in []))",
        "def score(p, r, a):\n    def each():\n        yield 1.0\n    return list(each())",
        "@listed\ndef score(p, r, a):\n    yield 1.0",
    ],
)
def test_what_may_be_called_with_three_lists_is_taken(tmp_path: Path, source: str) -> None:
    (tmp_path / "r.py").write_text(source)
    check_function(_python("r.py"), tmp_path / "r.py")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def other(p, r, a): ...", "nothing named 'score'"),
        ("class Judge:\n    def score(self, p, r, a): ...", "nothing named 'score'"),
        ("def score(p): ...", "a function of 1 argument at"),
        ("def score(p, r): ...", "a function of 2 arguments"),
        ("def score(p, r, a, b): ...", "a function of 4 arguments"),
        ("def score(p, r, a, *, key): ...", "needs the keyword 'key'"),
        ("async def score(p, r, a): ...", "an async function"),
        ("def score(p, r, a):\n    for x in r:\n        yield 1.0", "a function with `yield`"),
        ("class score:\n    def __call__(self, p, r, a): ...", "a class, not an object"),
        ("def score(completions, prompts, answer): ...", r"of \(completions, prompts, answer\)"),
        ("def score(data_source, solution_str, ground_truth, extra_info=None): ...", "of .data_source"),
    ],
)
def test_what_cannot_be_called_so_is_refused_at_submit(tmp_path: Path, source: str, found: str) -> None:
    (tmp_path / "r.py").write_text(source)
    with pytest.raises(ConfigError, match=found):
        check_function(_python("r.py"), tmp_path / "r.py")


def test_a_source_that_is_no_python_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("x = 1\ndef score(:\n")
    with pytest.raises(DataError, match="line 2"):
        check_function(_python("r.py"), tmp_path / "r.py")


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("def score(p, r, a): return [float(x in y) for x, y in zip(a, r)]", True),
        ("def score(p, r, answers, /): return judge(r, answers)", True),
        ("def score(p, r, a):\n    del a\n    return [1.0 for _ in r]", False),
        ("def score(*texts): return texts", False),
        ("from elsewhere import score", False),
    ],
)
def test_whether_a_reward_reads_the_answers_is_seen_without_running_it(
    tmp_path: Path, source: str, reads: bool
) -> None:
    (tmp_path / "r.py").write_text(source)
    assert check_function(_python("r.py"), tmp_path / "r.py") is reads
