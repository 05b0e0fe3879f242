"""Runs whose ranks are in a real image, with real runtimes, on a real Slurm: preempted, resumed, equal bit for bit.

The image is a Debian with its own Python and torch, and nothing of the daemon's (`tests.containers.image`). A runtime
that is not here is NOT RUN: docs/containers.md says where each can be had.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.containers import image as images
from tests.harness import ROOT, SMALL, LiveRun, ends_like
from tests.lanes import with_variants
from tests.processes import captured
from verl_slurm.containers.image import file_digest
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import preempt

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.long, pytest.mark.variant]

RUNTIMES = ("apptainer", "pyxis")
# A reward, and what its rank finds around it.
REWARD = """
import importlib.util, json, os, sys

def _argv():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            yield open(f"/proc/{pid}/cmdline").read()
        except OSError:
            pass

def _written(path):
    try:
        open(path, "w")
    except OSError:
        return False
    return True

with open(os.environ["SEEN_FILE"] + os.environ["SLURMD_NODENAME"], "w") as seen:
    found = {name: os.environ.get(name) for name in ("NCCL_DEBUG", "DEMO_TOKEN", "NODE_SET_UP", "LD_LIBRARY_PATH")}
    found |= {"prefix": sys.prefix, "cwd": os.getcwd(), "secret_in_argv": any("sesame" in words for words in _argv())}
    found["daemons"] = [name for name in @NOT_IN@ if importlib.util.find_spec(name)]
    json.dump(found | {"input_written": _written(__file__ + ".x")}, seen)

def score(prompts, responses, answers):
    return [0.0] * len(responses)
"""


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if problem := images.missing():
        pytest.skip(f"NOT RUN: {problem}")
    root = images.make_root(ROOT / ".image-root")
    return images.squashfs(root, tmp_path_factory.mktemp("image") / "image.sqsh")


@pytest.fixture
def cluster_for(
    cluster: DevCluster, make_cluster: Callable[..., DevCluster]
) -> Callable[[str], tuple[DevCluster, tuple[str, ...]]]:
    """A cluster on which a runtime works, and further words for `submit`."""

    def choose(runtime: str) -> tuple[DevCluster, tuple[str, ...]]:
        program = shutil.which("enroot" if runtime == "pyxis" else runtime)
        if program is None:
            pytest.skip(f"NOT RUN: no {runtime} here (docs/containers.md)")
        plugins = Path(program).parents[1] / "plugstack.conf"
        if runtime == "pyxis":
            if not plugins.exists():
                pytest.skip(f"NOT RUN: no Pyxis beside {program} (tests/containers/enroot_and_pyxis.sh)")
            # Nodes of the embedded cluster share one home, where Pyxis unpacks an image under the job's name.
            return make_cluster(plugstack=str(plugins), cred_expire_s=10), ("distributed.nodes=1",)
        # root of a virtual machine may lack capabilities that Apptainer asks for as root.
        more = (
            ("slurm.container.extra_args=[--userns]",) if runtime == "apptainer" and os.geteuid() == 0 else ()
        )
        return cluster, more

    return choose


@pytest.fixture
def started() -> Iterator[list[LiveRun]]:
    runs: list[LiveRun] = []
    yield runs
    for run in runs:
        run.cancel()


@pytest.mark.scenario("L20")
@pytest.mark.parametrize("runtime", with_variants(*RUNTIMES))
def test_a_run_in_an_image_is_preempted_and_ends_like_its_twin_outside(
    runtime: str,
    image: Path,
    twin: LiveRun,
    cluster_for: Callable[[str], tuple[DevCluster, tuple[str, ...]]],
    started: list[LiveRun],
    tmp_path: Path,
) -> None:
    cluster, more = cluster_for(runtime)
    words = (f"slurm.container.runtime={runtime}", f"slurm.container.image={image}", *more)
    run = LiveRun(cluster, tmp_path / "run", *SMALL, *words)
    started.append(run)
    run.submit()
    run.wait_phase("generate")
    assert file_digest(str(image)) in run.paths.run_yaml.read_text()
    preempt(cluster, int(run.job_id), hold_s=1)
    cause = run.wait_event("cause")
    assert cause["cause"] == "preemption", run.story()
    saved = run.wait_event("saved", emergency=True)
    run.wait_event("verified", name=saved["name"])
    run.wait_event("ended", exit_code=25)
    run.wait_event("restart", resume=saved["name"])
    ends_like(run, twin)


@pytest.mark.parametrize("runtime", with_variants(*RUNTIMES))
def test_ranks_in_an_image_have_what_the_run_says_and_nothing_of_the_daemon(
    runtime: str,
    image: Path,
    cluster_for: Callable[[str], tuple[DevCluster, tuple[str, ...]]],
    started: list[LiveRun],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/of/the/node")
    cluster, more = cluster_for(runtime)
    for name in ("reward", "seen"):
        (tmp_path / name).mkdir()
    (tmp_path / "reward/reward.py").write_text(REWARD.replace("@NOT_IN@", repr(images.NOT_IN)))
    secret = tmp_path / "secret"
    secret.write_text("sesame\n")
    secret.chmod(0o600)
    words = (
        "train.steps=1",
        "train.batch_size_per_device=16",
        f"model.reward=python:{tmp_path}/reward/reward.py:score",
        f"slurm.container={{runtime: {runtime}, image: {image}, binds: [{tmp_path}/seen], workdir: /var}}",
        "slurm.setup=['export NODE_SET_UP=$SLURMD_NODENAME']",
        f"env={{NCCL_DEBUG: WARN, SEEN_FILE: {tmp_path}/seen/}}",
        f"env_from_files.DEMO_TOKEN={secret}",
    )
    run = LiveRun(cluster, tmp_path / "run", *SMALL, *words, *more)
    started.append(run)
    run.submit()
    run.wait_end()
    seen = {path.name: json.loads(path.read_text()) for path in (tmp_path / "seen").iterdir()}
    assert seen
    for node, found in seen.items():
        assert found.pop("LD_LIBRARY_PATH") != "/of/the/node"
        assert found == {
            "prefix": "/usr",
            "cwd": "/var",
            "NCCL_DEBUG": "WARN",
            "DEMO_TOKEN": "sesame",
            "NODE_SET_UP": node,
            "secret_in_argv": False,
            "daemons": [],
            "input_written": False,
        }


def test_another_image_is_refused_and_the_run_is_not_started_again(
    image: Path,
    cluster_for: Callable[[str], tuple[DevCluster, tuple[str, ...]]],
    started: list[LiveRun],
    tmp_path: Path,
) -> None:
    cluster, more = cluster_for("apptainer")
    other = tmp_path / "image.sif"
    other.symlink_to(image)
    words = (f"slurm.container={{image: {other}}}", *more, "slurm.extra.begin=now+3")
    run = LiveRun(cluster, tmp_path / "run", *SMALL, *words)
    started.append(run)
    run.submit()
    other.unlink()
    other.write_bytes(b"another")
    run.wait_end(exit_code=10)
    again = captured(["grep", "-h", "the run's image is another one", "-r", str(run.paths.logs)])
    assert again.stdout, run.story()
