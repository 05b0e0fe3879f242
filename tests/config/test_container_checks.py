"""What a configuration may say of an image."""

from pathlib import Path

import pytest

from verl_slurm.base.errors import ConfigError
from verl_slurm.config.changes import may_change
from verl_slurm.config.load import dump, load, parse_config

DIGEST = "sha256:" + "0" * 64
GOOD = [
    "image: /i.sif",
    "image: ../images/i.sif",
    f"image: 'docker://nvcr.io/me/i@{DIGEST}'",
    "image: i.sqsh, runtime: pyxis",
    "image: /i.sqsh, runtime: pyxis",
    f"image: 'nvcr.io#me/i@{DIGEST}', runtime: pyxis",
    f"image: localhost/i@{DIGEST}, runtime: podman",
    f"image: /i.sif, digest: '{DIGEST}', mount_home: true, workdir: /w, extra_args: [--fakeroot]",
]


@pytest.mark.parametrize("text", GOOD)
def test_it_is_taken_and_kept_in_run_yaml(text: str, tmp_path: Path) -> None:
    config = parse_config(f"slurm: {{container: {{{text}}}}}".encode(), "x.yaml")
    (tmp_path / "run.yaml").write_bytes(dump(config))
    assert load(tmp_path / "run.yaml") == config


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("image: ''", "a path or a name"),
        ("image: -i.sif", "a path or a name"),
        ("image: docker://nvcr.io/me/i:1.0", "a file, or a name with its digest: NAME@sha256:..."),
        ("image: localhost/i, runtime: podman", "a file, or a name with its digest: NAME@sha256:..."),
        ("image: i@sha256:12, runtime: pyxis", "a file, or a name with its digest: NAME@sha256:..."),
        ("image: /i.sif, runtime: podman", "podman runs no file"),
        ("image: /i.sif, digest: abc", "sha256: and 64 hexadecimal digits"),
        (f"image: i@{DIGEST}, digest: '{DIGEST}'", "write it behind the name: NAME@sha256:..."),
        ("image: /i.sif, runtime: enroot", "slurm.container.runtime"),
        ("image: /i.sif, python: -c", "slurm.container.python"),
        ("image: /i.sif, binds: [data]", "an absolute path without `,` and `:`"),
        ("image: /i.sif, binds: ['/a:/b']", "an absolute path without `,` and `:`"),
        ("image: /i.sif, workdir: w", "an absolute path in the image"),
        ("image: /i.sif, mount_home: 1", "slurm.container.mount_home"),
        ("image: /i.sif, extra_args: [sh]", "an option with its value in one word"),
        ("image: /i.sif, extra_args: ['--']", "an option with its value in one word"),
        ("image: /i.sif, extra_args: [--bind=/a:/b]", "an option that the daemon does not set itself"),
        ("image: /i.sif, extra_args: [--env=TOKEN=sesame]", "use env, or env_from_files"),
        ("image: /i.sif, extra_arg: []", "expected no `extra_arg` in it"),
    ],
)
def test_bad_values_get_one_line(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"slurm: {{container: {{{text}}}}}".encode(), "x.yaml")
    assert told in caught.value.one_line()
    assert "\n" not in caught.value.one_line()
    assert "sesame" not in caught.value.one_line()


def test_it_may_change_between_two_submissions() -> None:
    assert may_change("slurm.container.image")
    assert may_change("slurm.container.digest")
