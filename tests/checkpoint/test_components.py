"""What a partial save holds, and that no run ever goes on from one."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders import make_manifest, run_config
from verl_slurm.base.errors import CheckpointCorrupt, ConfigError
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.components import partial_domains, require_same_models
from verl_slurm.checkpoint.format.specification import FORMAT_VERSION
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.commit import commit
from verl_slurm.checkpoint.store.recover import choose_resume
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.config.schema import CheckpointConfig

from .conftest import FILES, manifest_of, owns_it, stage

ACTOR_ONLY = {name: data for name, data in FILES.items() if not name.startswith(("critic/", "optimizer/"))}


def save_partial(paths: RunPaths, step: int, **changes: object) -> Path:
    staging = stage(paths.partial, step, files=ACTOR_ONLY)
    return commit(
        staging, manifest_of(staging, **({"components": ("actor",)} | changes)), attempt_check=owns_it
    )


@pytest.mark.parametrize(
    ("says", "changes", "expected"),
    [
        ("its components", {"components": ("actor",)}, ("actor",)),
        ("in the order of the format", {"components": ("critic", "actor")}, ("actor", "critic")),
        (
            "and the optimizer where asked for",
            {"components": ("actor",), "include_optimizer": True},
            ("actor", "optimizer"),
        ),
        ("without components there is nothing in it", {"include_optimizer": True}, ()),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_what_is_in_it(says: str, changes: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert partial_domains(CheckpointConfig(**changes)) == expected, says


def test_a_partial_checkpoint_verifies_with_what_it_says_it_holds(paths: RunPaths) -> None:
    verdict = verify(save_partial(paths, 10))
    assert verdict.ok
    assert verdict.manifest is not None
    assert verdict.manifest.components == ("actor",)


def test_one_that_does_not_say_it_is_partial_is_not_committed(paths: RunPaths) -> None:
    with pytest.raises(CheckpointCorrupt, match="critic/: required"):
        save_partial(paths, 10, components=())


def test_one_that_lacks_what_it_says_it_holds_is_not_committed(paths: RunPaths) -> None:
    with pytest.raises(CheckpointCorrupt, match="critic/: required"):
        save_partial(paths, 10, components=("actor", "critic"))


def test_auto_takes_an_older_full_one_over_a_newer_partial_one(
    paths: RunPaths, save: Callable[..., Path]
) -> None:
    save(5)
    save_partial(paths, 10)
    assert choose_resume(paths, "auto").name == "step_000005"


def test_auto_passes_over_a_partial_one_even_where_somebody_has_copied_it_among_the_full_ones(
    paths: RunPaths, save: Callable[..., Path]
) -> None:
    save(5)
    shutil.copytree(save_partial(paths, 10), paths.checkpoint(10))
    assert choose_resume(paths, "auto").name == "step_000005"
    kinds = {info.name: (info.kind, info.detail) for info in list_checkpoints(paths)}
    assert kinds["step_000010"] == ("foreign", "a partial checkpoint: actor only")
    assert paths.checkpoint(10).exists()


@pytest.mark.parametrize("named", ["path", "name"])
def test_one_that_is_named_is_refused_with_what_it_lacks(paths: RunPaths, named: str) -> None:
    path = save_partial(paths, 10)
    if named == "name":
        shutil.copytree(path, paths.checkpoint(10))
    with pytest.raises(ConfigError) as caught:
        choose_resume(paths, str(path) if named == "path" else path.name)
    assert "a partial checkpoint cannot be resumed from" in caught.value.one_line()
    assert "actor only" in caught.value.one_line()


def test_among_partial_ones_a_full_one_is_foreign(paths: RunPaths, save: Callable[..., Path]) -> None:
    save_partial(paths, 10)
    shutil.copytree(save(20), paths.partial.checkpoint(20))
    kinds = {info.name: info.kind for info in list_checkpoints(paths.partial, partial=True)}
    assert kinds == {"step_000010": "committed", "step_000020": "foreign"}


def test_an_algorithm_that_trains_the_same_models_is_another_one_all_the_same() -> None:
    config = run_config(algorithm="grpo")
    require_same_models(make_manifest(trained=("actor",), algorithm="grpo"), config, "")
    with pytest.raises(ConfigError, match="of another algorithm.*expected train.algorithm=ppo"):
        require_same_models(make_manifest(trained=("actor",), algorithm="ppo"), config, "")


def test_models_tell_the_algorithm_of_a_checkpoint_of_the_former_version() -> None:
    former = make_manifest(trained=("actor",), format_version=FORMAT_VERSION - 1)
    require_same_models(former, run_config(algorithm="grpo"), "")
    with pytest.raises(ConfigError, match="of another algorithm.*expected train.algorithm=grpo"):
        require_same_models(former, run_config(algorithm="ppo"), "")
