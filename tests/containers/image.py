"""Makes an image for the ranks: a small Debian with its own Python, and copies of the packages that ranks import.

    python -m tests.containers.image DIR [--all]

writes DIR/root (kept: a minute by debootstrap), DIR/image.sqsh (squashfs) and, with --all, DIR/oci (an OCI image
layout). The packages come from this environment, as `constraints/` pins them, so that no other torch can get in.
Nothing of the daemon's is among them: no submitit, watchdog or prometheus_client. (click comes with
huggingface_hub.)

It needs root, debootstrap, mksquashfs, and a Python of the minor version that the Debian has.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tests.slurm_versions.roots import mirror
from verl_slurm.containers.runtimes import AGENT_PACKAGES, OWN_PACKAGES, RANK_PACKAGES

SUITE, PYTHON = "bookworm", (3, 11)
NOT_IN = ("submitit", "watchdog", "prometheus_client", "boto3", "pytest")
"""What the daemon, the command line and tests import, and no rank does."""
ROOT = Path(__file__).parents[2]


def missing() -> str:
    """Why no image can be made here; empty: one can."""
    if os.geteuid() != 0:
        return "a root of Debian can be made by root alone"
    if absent := [name for name in ("debootstrap", "mksquashfs") if shutil.which(name) is None]:
        return f"no {' and no '.join(absent)} here (make containers)"
    if sys.version_info[:2] != PYTHON:
        found = sys.version.split()[0]
        return f"Debian {SUITE} has Python {PYTHON[0]}.{PYTHON[1]}, and the packages here are for {found}"
    return ""


def make_root(
    place: Path, packages: Sequence[str] = (*RANK_PACKAGES, *OWN_PACKAGES, *AGENT_PACKAGES)
) -> Path:
    """Make the root if it is not there, and put the present code into it."""
    root = place / "root"
    if not root.is_dir():
        place.mkdir(parents=True, exist_ok=True)
        half = place / ".half"
        shutil.rmtree(half, ignore_errors=True)
        options = ["--variant=minbase", "--include=python3,libstdc++6"]
        # In a namespace: what debootstrap mounts goes with it.
        argv = ["unshare", "--mount", "debootstrap", *options, SUITE, str(half), mirror()]
        with open(place / "debootstrap.log", "wb") as log:
            subprocess.run(argv, stdout=log, stderr=log, check=True)
        _fill(_packages_of(half), packages)
        half.rename(root)
    _put_ours(_packages_of(root))
    return root


def _packages_of(root: Path) -> Path:
    return root / f"usr/local/lib/python{PYTHON[0]}.{PYTHON[1]}/dist-packages"


def _fill(target: Path, packages: Sequence[str]) -> None:
    """Copy distributions, and what those require."""
    todo, seen = list(packages), set()
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # an alternative of another platform
        wanted = [Requirement(text) for text in found.requires or []]
        todo += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
        for file in found.files or []:
            source = Path(str(found.locate_file(file)))
            if not str(file).startswith("..") and source.is_file():
                copy = target / str(file)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, copy)


def _put_ours(target: Path) -> None:
    """As `pip install --no-deps verl-slurm` does."""
    for old in target.glob("verl_slurm*"):
        shutil.rmtree(old)
    for package in (ROOT / "verl_slurm", ROOT / "daemon/verl_slurm_daemon"):
        shutil.copytree(package, target / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    version = metadata.version("verl-slurm")
    about = target / f"verl_slurm-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verl-slurm\nVersion: {version}\n")


def squashfs(root: Path, file: Path) -> Path:
    """Pack the root for Enroot, Pyxis and Apptainer."""
    argv = ["mksquashfs", str(root), str(file), "-noappend", "-no-progress", "-quiet", "-comp", "zstd"]
    subprocess.run([*argv, "-Xcompression-level", "1"], check=True, stdout=subprocess.DEVNULL)
    return file


def oci_layout(root: Path, layout: Path) -> str:
    """Pack the root as an OCI image layout of one layer, and return the digest of its manifest."""
    blobs = layout / "blobs/sha256"
    blobs.mkdir(parents=True)
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def keep(data: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {
            "mediaType": f"application/vnd.oci.image.{kind}",
            "digest": f"sha256:{digest}",
            "size": len(data),
        }

    layer = blobs / "layer"
    with tarfile.open(layer, "w") as tar:
        tar.add(root, arcname=".", filter=lambda one: None if one.isdev() else one)
    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    size = layer.stat().st_size
    layer.rename(blobs / digest)
    described = {
        "mediaType": "application/vnd.oci.image.layer.v1.tar",
        "digest": f"sha256:{digest}",
        "size": size,
    }
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    about = keep(json.dumps(config).encode(), "config.v1+json")
    manifest = {"schemaVersion": 2, "config": about, "layers": [described]}
    manifest["mediaType"] = "application/vnd.oci.image.manifest.v1+json"
    entry = keep(json.dumps(manifest).encode(), "manifest.v1+json")
    index = {"schemaVersion": 2, "manifests": [entry]}
    (layout / "index.json").write_text(json.dumps(index))
    return str(entry["digest"])


def main() -> int:
    """Make what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.containers.image", description=__doc__)
    parser.add_argument("place", type=Path)
    parser.add_argument("--all", action="store_true", help="the OCI layout, too")
    chosen = parser.parse_args()
    if problem := missing():
        print(f"NOT RUN: {problem}")
        return 0
    root = make_root(chosen.place)
    print(squashfs(root, chosen.place / "image.sqsh"))
    if chosen.all:
        shutil.rmtree(chosen.place / "oci", ignore_errors=True)
        print(chosen.place / "oci", oci_layout(root, chosen.place / "oci"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
