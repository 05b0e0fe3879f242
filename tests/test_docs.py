"""The pages stay true: their commands exist, their configurations load, and what they link to or name is there."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

from click.testing import CliRunner
from verl_slurm_daemon.decide.lead_model import FailureKind

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.cli.main import COMMANDS, cli
from verl_slurm.config.changes import may_change
from verl_slurm.config.explain import all_keys
from verl_slurm.config.load import parse_config
from verl_slurm.journal.causes import CauseKind

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        *(ROOT / "tests").rglob("README.md"),
        *(ROOT / "changelog.d").glob("*.md"),
        ROOT / "benchmarks/results/README.md",
    ]
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_FILE = re.compile(
    r"(?<![\w./-])((?:verl_slurm|daemon|sbatch|configs|benchmarks|docs|tests|constraints)/[\w./-]+\.\w+)"
)

_PAGE_IN_CODE = re.compile(r"(?<![\w./-])(docs/(?:decisions/)?[\w-]+\.md)\b")
_SOURCES = {".py", ".yaml", ".yml", ".toml", ".sbatch"}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _prose(text: str) -> str:
    return _FENCE.sub("", text)


def _spoken(program: str) -> Iterator[tuple[str, str]]:
    """(page, command) of every command of `program` that a page shows, in a block or within a line."""
    for page in PAGES:
        text = page.read_text()
        blocks = "\n".join(body for _, body in _FENCE.findall(text))
        lines = [line.removeprefix("$ ") for line in blocks.splitlines()]
        inline = [" ".join(words.split()) for words in _INLINE.findall(_prose(text))]
        for command in [*lines, *inline]:
            if re.match(rf"{program} [a-z]", command):
                yield _name(page), re.split(r"\s+#|\s\|\s|\s&&\s", command)[0].strip()


@cache
def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _prose(page.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


COMMANDS_OF_PAGES = sorted(set(_spoken("verl-slurm")))
TARGETS_OF_PAGES = sorted(set(_spoken("make")))


def test_there_is_something_to_check() -> None:
    assert len(PAGES) > 40
    assert len(COMMANDS_OF_PAGES) > 80
    assert len(TARGETS_OF_PAGES) > 20


@cache
def _help(*words: str) -> str:
    return CliRunner().invoke(cli, [*words, "--help"]).output


def _unknown_words(command: str) -> list[str]:
    """The words of a command that the command line does not know."""
    _, name, *words = shlex.split(command.replace("[", " ").replace("]", " ").replace(",", " "))
    ours = words[: words.index("--")] if "--" in words else words
    if name not in COMMANDS:
        return [name]
    help_text = _help(name)
    group = re.findall(r"^  ([a-z-]+)  ", help_text.partition("Commands:")[2], re.MULTILINE)
    if ours and ours[0] in group:
        help_text = _help(name, ours[0])
    return [word for word in ours if re.match("--[a-z]", word) and word.partition("=")[0] not in help_text]


def test_a_command_of_a_page_is_understood() -> None:
    unknown = {(page, command): _unknown_words(command) for page, command in COMMANDS_OF_PAGES}
    assert {where: words for where, words in unknown.items() if words} == {}


def test_a_make_target_of_a_page_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        (page, word)
        for page, command in TARGETS_OF_PAGES
        for word in shlex.split(command)[1:]
        if "=" not in word
    }
    assert sorted(one for one in named if one[1] not in targets) == []


def test_a_configuration_that_a_page_shows_or_that_ships_loads() -> None:
    for page in PAGES:
        for kind, block in _FENCE.findall(page.read_text()):
            if kind == "yaml":
                parse_config(block.encode(), _name(page))
    for path in ROOT.glob("configs/**/*.yaml"):
        parse_config(path.read_bytes(), str(path))


def test_the_table_of_exit_codes_is_the_codes() -> None:
    text = (DOCS / "exit-codes.md").read_text()
    table = dict(re.findall(r"^\| (\d+) \| (.+?) \|$", text, re.MULTILINE))
    assert table == {str(int(code)): code.description for code in ExitCode}


def test_the_page_of_configurations_says_which_sections_may_change() -> None:
    text = (DOCS / "configuration.md").read_text()
    (row,) = re.findall(r"^\| (.*) \| they do not touch what our trainer computes;.*\|$", text, re.MULTILINE)[
        :1
    ]
    sections = _INLINE.findall(row)
    assert len(sections) == 9
    assert all(may_change(f"{section}.x") for section in sections)


def test_the_table_of_causes_has_each_cause_once_and_names_settings_that_exist() -> None:
    text = (DOCS / "preemption.md").read_text()
    causes = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    of_the_run = {*get_args(FailureKind), "lead_lost", "start"}
    assert sorted(causes) == sorted({*get_args(CauseKind), *of_the_run})
    named = {word for word in _INLINE.findall(_prose(text)) if re.fullmatch(r"(daemon|slurm)\.\w+", word)}
    assert len(named) > 8
    assert sorted(named - {key.key for key in all_keys()}) == []


def test_the_links_of_a_page_lead_somewhere() -> None:
    dead = []
    for page in PAGES:
        for link in _LINK.findall(_prose(page.read_text())):
            if re.match(r"https?://", link):
                continue
            target, _, anchor = link.partition("#")
            place = (page.parent / target).resolve() if target else page
            if not place.exists() or (anchor and anchor not in _anchors(place)):
                dead.append(f"{_name(page)}: {link}")
    assert dead == []


def test_the_files_that_a_page_names_are_there() -> None:
    named = {(_name(page), name) for page in PAGES for name in _FILE.findall(page.read_text())}
    assert sorted(one for one in named if "DATE" not in one[1] and not (ROOT / one[1]).exists()) == []


def test_the_pages_that_code_tests_and_examples_name_are_there() -> None:
    trees = ("verl_slurm", "daemon", "benchmarks", "tests", "configs", "sbatch")
    sources = [path for tree in trees for path in (ROOT / tree).rglob("*") if path.suffix in _SOURCES]
    named = {
        found for path in [*sources, ROOT / "Makefile"] for found in _PAGE_IN_CODE.findall(path.read_text())
    }
    assert len(named) > 15
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_every_page_is_in_its_index() -> None:
    for index, pages in (
        ("docs/index.md", DOCS.glob("*.md")),
        ("docs/decisions/README.md", DOCS.glob("decisions/*.md")),
    ):
        place = ROOT / index
        linked = {(place.parent / link).resolve() for link in _LINK.findall(place.read_text())}
        assert [page.name for page in pages if page != place and page not in linked] == []


def test_the_map_has_a_line_for_each_package_and_names_files_that_are_there() -> None:
    text = (DOCS / "architecture.md").read_text()
    first_cells = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    packages = [path.parent.name for path in (ROOT / "verl_slurm").glob("*/__init__.py")]
    assert [name for name in packages if first_cells.count(name) != 1] == []
    roots = (ROOT, ROOT / "verl_slurm", ROOT / "daemon/verl_slurm_daemon")
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    assert sorted(name for name in named if not any((root / name).is_file() for root in roots)) == []


def test_a_page_names_nothing_in_a_file_that_the_file_does_not_have() -> None:
    """Pages write `file.py` (`name`, `other`), also of several files of one name."""
    sources = [*(ROOT / "verl_slurm").rglob("*.py"), *(ROOT / "daemon").rglob("*.py")]
    missing = []
    for page in PAGES:
        for file, names in re.findall(
            r"`([\w/]+\.py)`(?: of the daemon)? \(((?:`\w+`(?:, )?)+)\)", page.read_text()
        ):
            text = "".join(path.read_text() for path in sources if path.as_posix().endswith(f"/{file}"))
            missing += [
                f"{_name(page)}: {file} {name}" for name in re.findall(r"\w+", names) if name not in text
            ]
    assert missing == []


def test_a_page_says_first_who_needs_it() -> None:
    heads = {page: page.read_text().split("\n")[:3] for page in DOCS.glob("*.md") if page.name != "pypi.md"}
    wrong = [
        page.name
        for page, (title, blank, first) in heads.items()
        if not (title.startswith("# ") and blank == "" and first.startswith("For "))
    ]
    assert wrong == []
