"""What is in the wheel: licence, metadata, and every page and example that messages point to."""

import re
import subprocess
import zipfile
from collections.abc import Callable
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
Installed = Callable[..., subprocess.CompletedProcess[str]]
_MENTION = re.compile(r"(?<![\w./-])((?:docs|configs|sbatch|constraints)/[\w/-]+\.(?:md|yaml|py|sbatch|txt))")


@pytest.fixture(scope="module")
def files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist()}


@pytest.mark.scenario("USE15")
def test_the_metadata_names_licence_author_and_classifiers(files: dict[str, bytes]) -> None:
    (text,) = (data for name, data in files.items() if name.endswith(".dist-info/METADATA"))
    found = message_from_bytes(text)
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Author"]
    assert any("Linux" in line for line in found.get_all("Classifier") or [])
    (licence,) = (data for name, data in files.items() if name.endswith("licenses/LICENSE"))
    assert b"Apache License" in licence


@pytest.mark.scenario("USE15")
def test_the_index_page_has_no_link_that_is_dead_there(files: dict[str, bytes]) -> None:
    (text,) = (data.decode() for name, data in files.items() if name.endswith(".dist-info/METADATA"))
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


@pytest.mark.scenario("USE15")
def test_every_page_and_example_that_the_code_names_is_in_the_wheel(files: dict[str, bytes]) -> None:
    named = {
        found
        for name, data in files.items()
        if name.endswith(".py") and name.startswith("verl_slurm")
        for found in _MENTION.findall(data.decode())
    }
    there = {name.partition("share/verl-slurm/")[2] for name in files}
    assert len(named) > 10
    assert named - there == set()


@pytest.mark.scenario("USE15")
def test_help_names_pages_by_paths_that_open(installed: Installed) -> None:
    for command in ("tiers", "inspect"):
        unwrapped = re.sub(r"\n +", "", installed(command, "--help").stdout)
        (page,) = set(re.findall(r"(/[\w/.-]*docs/[\w-]+\.md)", unwrapped))
        assert Path(page).is_file(), page
    root = installed("--help").stdout.split()[-1]
    assert (Path(root) / "docs" / "doctor.md").is_file()


@pytest.mark.scenario("USE14")
@pytest.mark.parametrize("name", ["quickstart", "pytorch_loop"])
def test_a_shipped_example_is_found_by_its_name_from_anywhere(installed: Installed, name: str) -> None:
    done = installed("submit", name, "--cluster", "local", "--dry-run")
    assert "needs the package torch" in done.stderr, "found and checked, as far as this environment goes"


@pytest.mark.scenario("USE14")
def test_the_line_that_help_says_to_try_is_understood_anywhere(installed: Installed) -> None:
    line = next(line for line in installed("--help").stdout.splitlines() if "Try it here" in line)
    words = line.partition("verl-slurm ")[2].split()
    done = installed(*words, "--dry-run")
    assert "no such configuration" not in done.stderr
    assert "needs the package torch" in done.stderr


@pytest.mark.scenario("USE14")
def test_the_path_of_an_example_in_the_help_of_submit_works_too(installed: Installed, core: Path) -> None:
    path = core / "share/verl-slurm/configs/pytorch_loop.yaml"
    done = installed("submit", path, "--cluster", "local", "--dry-run")
    assert "no such program" not in done.stderr


@pytest.mark.scenario("USE03")
@pytest.mark.parametrize(
    ("package", "release"),
    [("torch", "2.11.0"), ("transformers", "5.9.0"), ("numpy", "2.0.0"), ("vllm", "0.24.0")],
)
def test_the_metadata_allows_the_releases_that_verl_pins(
    files: dict[str, bytes], package: str, release: str
) -> None:
    (text,) = (data for name, data in files.items() if name.endswith(".dist-info/METADATA"))
    wanted = [Requirement(line) for line in message_from_bytes(text).get_all("Requires-Dist") or []]
    (found,) = (one for one in wanted if one.name == package)
    assert found.specifier.contains(release)
    assert found.marker is not None, "an extra's, not the core's"


@pytest.mark.scenario("USE03")
def test_the_metadata_allows_what_pip_once_found_beside_verls_whole_tree(files: dict[str, bytes]) -> None:
    """While it does, pip finds a way: a floor above one of these releases would take that one away."""
    text = (Path(__file__).parent / "beside_verl.txt").read_text()
    chosen = {one.name: one.specifier for one in map(Requirement, re.findall(r"^[^#].*", text, re.MULTILINE))}
    (metadata,) = (data for name, data in files.items() if name.endswith(".dist-info/METADATA"))
    wanted = [Requirement(line) for line in message_from_bytes(metadata).get_all("Requires-Dist") or []]
    ours = [
        one
        for one in wanted
        if one.marker is None
        or any(one.marker.evaluate({"extra": extra}) for extra in ("trainer", "verl", "vllm"))
    ]
    ours = [one for one in ours if one.name != "verl-slurm"]
    assert len(ours) > 20
    kept_out = [
        str(one)
        for one in ours
        if not one.specifier.contains(str(chosen[canonicalize_name(one.name)]).removeprefix("=="))
    ]
    assert kept_out == []


@pytest.mark.scenario("USE03")
def test_constraints_name_no_release_that_a_plain_index_lacks(files: dict[str, bytes]) -> None:
    lists = {name: data.decode() for name, data in files.items() if "share/verl-slurm/constraints/" in name}
    assert lists
    local = [
        f"{name}: {line}"
        for name, text in lists.items()
        for line in text.splitlines()
        if re.match(r"\w.*\+", line)
    ]
    assert local == [], "PyPI has no local versions such as +cpu"
