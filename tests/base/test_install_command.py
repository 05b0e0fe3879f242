"""The command that installs an extra names where this verl-slurm came from."""

import json
from pathlib import Path

import pytest

import verl_slurm
from verl_slurm.base import packages


def test_in_a_checkout_it_names_the_checkout() -> None:
    assert packages.install_command("s3", "py") == f"py -m pip install '{Path(__file__).parents[2]}[s3]'"


@pytest.mark.parametrize(("there", "named"), [(True, True), (False, False)], ids=["there", "gone"])
def test_elsewhere_it_names_the_wheel_while_that_is_there(
    there: bool, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "my wheels" / "verl_slurm-1-py3-none-any.whl"
    info = tmp_path / "site" / "verl_slurm-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: verl-slurm\nVersion: 1\n")
    (info / "direct_url.json").write_text(json.dumps({"url": wheel.as_uri(), "archive_info": {}}))
    if there:
        wheel.parent.mkdir()
        wheel.touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(packages, "__file__", str(tmp_path / "site/verl_slurm/base/packages.py"))
    what = f"{wheel}[s3]" if named else f"verl-slurm[s3]=={verl_slurm.__version__}"
    assert packages.install_command("s3", "py") == f"py -m pip install '{what}'"
