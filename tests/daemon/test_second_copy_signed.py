"""The way home with a key: a node sends what is signed, the lead takes what is signed."""

from pathlib import Path

import pytest
from verl_slurm_daemon.lead.nodes_copies import collect, run_bring_home

from tests.builders import write_config
from tests.checkpoint.sealed import save_sealed
from verl_slurm.base.errors import KeyRefused
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.files import private_dir
from verl_slurm.base.keys import Keyring, new_key_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.local_copy import local_directory, this_node
from verl_slurm.checkpoint.store.verify import verify


def test_only_signed_parts_come_home_and_a_node_without_the_key_says_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    key = new_key_file(tmp_path / "run.key")
    keys = Keyring(key)
    paths = RunPaths(private_dir(tmp_path / "run"))
    take_attempt(paths, job_id="1", restart=0)
    write_config(paths, local_dir=tmp_path / "nvme", key_file=tmp_path / "run.key")
    local = local_directory(str(tmp_path / "nvme"), paths, this_node())
    assert local is not None
    local.mkdir(parents=True)
    for step, signer in ((2, key), (4, None)):
        made = save_sealed(paths, step, signer)
        made.rename(local / made.name)

    assert run_bring_home(paths.root, 1, "") == ExitCode.OK
    (line,) = collect(paths, 1, keys)
    assert line.startswith("step_000002: brought home")
    assert verify(paths.checkpoint(2), keys=keys).ok
    assert not paths.checkpoint(4).exists()
    (tmp_path / "run.key").unlink()
    with pytest.raises(KeyRefused, match="cannot be read"):
        run_bring_home(paths.root, 1, "")
