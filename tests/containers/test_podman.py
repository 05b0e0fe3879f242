"""A real Podman runs a real image, by its digest, from an OCI layout: what an agent starts, without a run around it."""

import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.containers import image as images
from tests.harness import ROOT
from verl_slurm.config.load import parse_config
from verl_slurm.containers import runtimes
from verl_slurm.containers.inside import ENVIRONMENT, LIFELINE, pack_environment
from verl_slurm.containers.runtimes import contained_ranks_argv

pytestmark = [pytest.mark.slow, pytest.mark.long]

# crun refuses a machine with both versions of cgroups; in a namespace of its own it sees the second alone.
SECOND_ALONE = 'umount -R -l /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && exec "$@"'
TELL = """
import os
found = [os.getppid(), os.getuid(), os.getcwd(), os.environ["SAID"], os.environ["DEMO_TOKEN"]]
open("{run}/written", "w")
try:
    open("/usr/written", "w")
except OSError:
    found.append("the image is read-only")
print(*found)
"""
Start = Callable[..., "subprocess.CompletedProcess[str]"]


def podman(*words: str) -> list[str]:
    hybrid = Path("/sys/fs/cgroup/unified").is_dir()
    return [*(["unshare", "--mount", "sh", "-c", SECOND_ALONE, "sh"] if hybrid else []), *words]


@pytest.fixture
def start(tmp_path: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start a program in a new image, as an agent does."""
    if problem := images.missing():
        pytest.skip(f"NOT RUN: {problem}")
    if shutil.which("podman") is None:
        pytest.skip("NOT RUN: no podman here (make containers)")
    storage = tmp_path / "storage.conf"
    places = f'graphroot = "{short_dir}/graph"\nrunroot = "{short_dir}/run"'
    storage.write_text(f'[storage]\ndriver = "vfs"\n{places}\n')
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(storage))
    root = images.make_root(ROOT / ".image-root/bare", ("msgspec",))
    digest = images.oci_layout(root, tmp_path / "oci")
    pulled = podman("podman", "pull", "-q", f"oci:{tmp_path}/oci")
    done = subprocess.run(pulled, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"NOT RUN: podman does not work here: {done.stderr.strip()[-200:]}")
    tag = podman("podman", "tag", done.stdout.strip(), "localhost/rl:1")
    subprocess.run(tag, check=True)
    control = tmp_path / "control"
    control.mkdir(mode=0o700)
    (control / ENVIRONMENT).write_bytes(pack_environment({"SAID": "this", "DEMO_TOKEN": "sesame"}))
    # A machine may not let its root raise limits; podman would.
    limits = "[--ulimit=nofile=1024:1024, --ulimit=nproc=4096:4096]"
    words = (
        f"run_dir={tmp_path}/run",
        f"slurm.container={{runtime: podman, image: localhost/rl@{digest}, extra_args: {limits}}}",
    )
    (tmp_path / "run").mkdir()
    config = parse_config(b"", "x.yaml", words)

    def go(*packages: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(runtimes, "RANK_PACKAGES", packages)
        monkeypatch.setattr(runtimes, "OWN_PACKAGES", ())
        program = ["python3", "-c", TELL.format(run=tmp_path / "run")]
        with socket.socket(socket.AF_UNIX) as line:
            line.bind(os.path.relpath(control / LIFELINE))
            line.listen(1)
            argv = contained_ranks_argv(config, "", str(control), program)
            return subprocess.run(podman(*argv), capture_output=True, text=True, timeout=300, check=False)

    return go


@pytest.mark.variant
def test_podman_runs_what_an_agent_starts_and_an_image_that_lacks_something_says_so(
    start: Start, tmp_path: Path
) -> None:
    done = start("msgspec", "torch")
    assert done.returncode == 1
    assert done.stderr.startswith("ConfigError: the image lacks what ranks import: localhost/rl@sha256:")
    assert "(found no torch, expected them)" in done.stderr
    (tmp_path / "control" / LIFELINE).unlink()
    done = start("msgspec")
    # The parent is the first process of the container, which has a namespace of its own.
    assert done.stdout == "1 0 /tmp this sesame the image is read-only\n", done.stderr
    assert (tmp_path / "run/written").exists()
    assert not (tmp_path / "control" / ENVIRONMENT).exists()
