"""The reference is what the code says, and the schema for editors takes what `load` takes."""

import ast
import json
import re
from pathlib import Path

import pytest
from jsonschema import Draft7Validator
from ruamel.yaml import YAML

from tests import reference_pages
from tests.reference_pages import PAGES, READ, ROOT
from verl_slurm.base.errors import ConfigError
from verl_slurm.config.explain import all_keys
from verl_slurm.config.load import parse_config

SOURCES = sorted([*(ROOT / "verl_slurm").rglob("*.py"), *(ROOT / "daemon").rglob("*.py")])
SCHEMA = Draft7Validator(json.loads((ROOT / "configs/schema.json").read_text()))
_BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Set by torchrun, or by our own launcher in its place.
_TORCHRUN = {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_generated_page_is_what_the_code_says(path: Path) -> None:
    assert path.read_text() == PAGES[path](), "python -m tests.reference_pages"


def test_every_variable_of_ours_is_on_the_page_of_variables() -> None:
    named = {name for path in SOURCES for name in re.findall(r"\bVERL_SLURM_[A-Z_]+\b", path.read_text())}
    # The first is an example of a name that a user chooses, the second the beginning of several.
    named -= {"VERL_SLURM_KEY", "VERL_SLURM_SERVICE_"}
    assert len(named) > 12
    assert sorted(name for name in named if f"`{name}`" not in reference_pages.variables()) == []


def _read(path: Path) -> set[str]:
    """The names that a module looks up in the environment, where they stand there as text."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        name: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            # Not what a function of ours makes of it.
            value = ast.unparse(node.func.value)
            if node.func.attr in ("get", "pop", "getenv") and value.endswith(("environ", "environ)")):
                name = node.args[0]
        elif isinstance(node, ast.Subscript) and "environ" in ast.unparse(node.value):
            name = node.slice if isinstance(node.ctx, ast.Load) else None
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            found.add(name.value)
    return found


def test_the_variables_that_are_read_from_a_user_are_on_the_page() -> None:
    read = {name for path in SOURCES for name in _read(path)} - _TORCHRUN
    assert {name for name in read if not name.startswith(("SLURM", "SUBMITIT_"))} == {
        name for name, _ in READ
    } - {
        "SLURM_CONF",
        "SLURM_TMPDIR",
    }
    assert {"SLURM_CONF", "SLURM_TMPDIR"} <= read, "of Slurm's, those that a user or a site sets"


def test_a_page_of_commands_has_a_section_for_each_and_shows_no_path_of_this_machine() -> None:
    page = reference_pages.commands()
    assert "## submit\n" in page
    assert "### devcluster start\n" in page
    assert str(ROOT) not in page


def test_markup_in_help_is_shown_and_not_obeyed() -> None:
    text = reference_pages._prose("*.py of <b>RUN</b> and `*.md`, [x](y), a_b _c")
    assert text == r"\*.py of &lt;b>RUN&lt;/b> and `*.md`, \[x\](y), a_b \_c"


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.yaml")), ids=lambda path: path.name)
def test_a_configuration_that_ships_fits_the_schema(path: Path) -> None:
    assert [error.message for error in SCHEMA.iter_errors(YAML(typ="safe").load(path.read_text()))] == []


def test_every_configuration_of_a_page_fits_the_schema() -> None:
    blocks = [block for page in (ROOT / "docs").glob("*.md") for block in _BLOCK.findall(page.read_text())]
    assert len(blocks) > 10
    errors = [error.message for block in blocks for error in SCHEMA.iter_errors(YAML(typ="safe").load(block))]
    assert errors == []


@pytest.mark.parametrize(
    "text",
    [
        "train: {stepz: 3}",
        "stepz: 3",
        "rollout: {engine: fast}",
        "train: {steps: many}",
        "seed: -1",
        "tiers: [{}]",
    ],
)
def test_what_is_refused_for_its_key_or_type_does_not_fit_the_schema(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_config(text.encode(), "my.yaml")
    assert list(SCHEMA.iter_errors(YAML(typ="safe").load(text)))


def test_a_heading_with_nothing_below_it_fits_the_schema_as_it_loads() -> None:
    text = "slurm:\ntrain:\n"
    parse_config(text.encode(), "my.yaml")
    assert list(SCHEMA.iter_errors(YAML(typ="safe").load(text))) == []


def test_the_schema_tells_the_meaning_of_a_key() -> None:
    meaning = next(key.meaning for key in all_keys() if key.key == "train.kl_coef")
    assert SCHEMA.schema["$defs"]["TrainConfig"]["properties"]["kl_coef"]["description"] == meaning
