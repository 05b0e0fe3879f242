"""The command line answers at once: `--help` imports neither torch nor submitit, nor anything else that is slow."""

import json
import subprocess
import sys

from verl_slurm.cli.main import COMMANDS

HEAVY = (
    "torch",
    "submitit",
    "transformers",
    "numpy",
    "ruamel",
    "asyncio",
    "watchdog",
    "psutil",
    "msgspec",
    "stringzilla",
)
_PROBE = """
import json, sys
from verl_slurm.cli.__main__ import main
code = main(sys.argv[1:])
sys.stdout.flush()
print("MODULES " + json.dumps(sorted(sys.modules)), file=sys.stderr)
sys.exit(code)
"""


def imported_by(*words: str) -> tuple[set[str], subprocess.CompletedProcess[str]]:
    done = subprocess.run([sys.executable, "-c", _PROBE, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.rpartition("MODULES ")[2])), done


def test_help_imports_nothing_heavy_and_lists_every_command_and_exit_code() -> None:
    modules, done = imported_by("--help")
    assert not modules & set(HEAVY)
    for name in COMMANDS:
        assert f"  {name} " in done.stdout
    assert "a checkpoint did not verify" in done.stdout


_PROBE_EACH = """
import os, sys
from verl_slurm.cli.__main__ import main
for name in sys.argv[1:]:
    if os.fork() == 0:  # a process that has imported no other command
        code = main([name, "--help"])
        sys.stdout.flush()
        found = sorted({"torch", "submitit", "transformers"} & set(sys.modules))
        print(name, code, *found, file=sys.stderr, flush=True)
        os._exit(0)
    os.wait()
"""


def test_help_of_a_command_imports_neither_torch_nor_submitit() -> None:
    argv = [sys.executable, "-c", _PROBE_EACH, *COMMANDS]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [f"{name} 0" for name in COMMANDS]
    assert done.stdout.count("Usage: verl-slurm") == len(COMMANDS)


def test_without_a_metrics_port_nothing_imports_prometheus() -> None:
    """It is 2 MB, and only who asked for a port pays them."""
    probe = (
        "import sys, verl_slurm_daemon.lead.lead_loop, verl_slurm_daemon.agent.node; "
        "print([m for m in sys.modules if m.startswith('prometheus')])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_a_key_nothing_imports_cryptography() -> None:
    """A daemon of 40 MB that verifies has no use for it."""
    probe = (
        "import sys, verl_slurm_daemon.lead.lead_loop, verl_slurm.checkpoint.format.encryption; "
        "import verl_slurm.checkpoint.store.commit, verl_slurm.base.keys, verl_slurm.runtime_state.sealing; "
        "verl_slurm.base.keys.load_keys(None); verl_slurm.base.keys.MasterKey(bytes(32)); "
        "print([m for m in sys.modules if m.startswith('cryptography')])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
