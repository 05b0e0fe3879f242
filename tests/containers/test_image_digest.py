"""The image of a run is the one that was submitted, or the run does not start."""

from pathlib import Path

import pytest

from tests.builders import run_config
from verl_slurm.base.errors import ConfigError
from verl_slurm.config.schema import ContainerConfig, RunConfig
from verl_slurm.containers.image import check_image, pin_image
from verl_slurm.submit.check_list import check_container

# sha256sum of "image"
DIGEST = "sha256:6105d6cc76af400325e94d588ce511be5bfdbb73b437dc51eca43917d7a43e3d"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "i.sif").write_bytes(b"image")
    return run_config(container=ContainerConfig(image=str(tmp_path / "i.sif")))


def test_the_digest_of_a_file_is_recorded_and_each_attempt_checks_it(
    config: RunConfig, tmp_path: Path
) -> None:
    pinned = pin_image(config)
    assert pinned.slurm.container is not None
    assert pinned.slurm.container.digest == DIGEST
    check_image(pinned)
    (tmp_path / "i.sif").write_bytes(b"another")
    for check in (check_image, pin_image):
        with pytest.raises(ConfigError) as caught:
            check(pinned)
        told = caught.value.one_line()
        assert told.startswith(f"the run's image is another one: {tmp_path}/i.sif (found sha256:")
        assert f"expected {DIGEST}" in told
        assert told.endswith("to take this one: verl-slurm submit RUN slurm.container.digest=null")
    (tmp_path / "i.sif").unlink()
    with pytest.raises(ConfigError, match="the run's image cannot be read"):
        check_image(pinned)


def test_a_run_without_an_image_is_left_as_it_is() -> None:
    config = run_config()
    assert check_container(config, "local") == (config, [])
    check_image(config)


def test_pyxis_is_refused_where_there_is_no_slurm(config: RunConfig) -> None:
    container = ContainerConfig(image="a@sha256:" + "0" * 64, runtime="pyxis")
    with pytest.raises(ConfigError, match="Pyxis is a plugin of Slurm's srun"):
        check_container(run_config(container=container), "local")
    check_container(run_config(container=container), "slurm")


def test_a_path_that_runtimes_would_take_apart_is_refused_at_submission(config: RunConfig) -> None:
    container = config.slurm.container
    with pytest.raises(ConfigError, match="a path cannot be mounted into a container: /data/a,b"):
        check_container(run_config(container=container, root="/data/a,b"), "slurm")
