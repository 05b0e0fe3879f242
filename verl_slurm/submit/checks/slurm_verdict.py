"""Has Slurm judge the very script that would be queued, with `sbatch --test-only`: nothing is queued.

sbatch's refusals are one sentence that names no key. `refused_keys` translates them; submission also uses it for
sbatch's refusal of the real script.
"""

import os
import re
import shutil
import subprocess

from verl_slurm.base.errors import SlurmMissing, SlurmRefused
from verl_slurm.config.checks.options import OWN_OPTIONS
from verl_slurm.config.schema import RunConfig
from verl_slurm.slurm.batch import submission_environment
from verl_slurm.slurm.runner import slurm_words, waiting_for

_TIMEOUT_S = 20.0
"""slurmctld plans the start of the job for this; on a large, full cluster that takes seconds."""
_KEYS = (
    (r"\bgres\b|generic resource|trackable resource|\bTRES\b", "slurm.gpus_per_node"),
    (r"\baccount\b", "slurm.account"),
    (r"\bqos\b", "slurm.qos"),
    (r"time limit", "slurm.time_limit_min"),
    (r"\bmemory\b", "slurm.mem_mb_per_node"),
    (r"\bfeatures?\b|\bconstraint", "slurm.extra.constraint"),
    (r"\breservation", "slurm.extra.reservation"),
    (r"\blicenses?\b", "slurm.extra.licenses"),
    (r"\bpartition", "slurm.partition"),
    (r"processors|\bCPUs?\b", "slurm.cpus_per_node"),
    (r"node count|\bnodes?\b", "distributed.nodes"),
)
_OF_A_NODE = ("distributed.nodes", "slurm.cpus_per_node", "slurm.mem_mb_per_node", "slurm.gpus_per_node")
"""No node has all of these: sbatch does not say which one is too much."""
_REMEDIES = {
    "slurm.gpus_per_node": "`sinfo -o '%P %G'` shows the GPUs of each partition; slurm.gpus_per_node=0 asks for none",
    "slurm.extra.nodelist": "`sinfo -N` lists the nodes",
    "slurm.account": "`sacctmgr show assoc user=$USER` lists yours",
    "slurm.qos": "`sacctmgr show assoc user=$USER format=account,qos` lists yours",
    "slurm.time_limit_min": "`sinfo -o '%P %l'` shows the limits",
    "slurm.mem_mb_per_node": "`sinfo -o '%P %m'` shows what the nodes have, in MB",
    "slurm.cpus_per_node": "`sinfo -o '%P %c'` shows what the nodes have",
    "slurm.partition": "`sinfo -s` lists them",
    "distributed.nodes": "`sinfo -o '%P %D %c %m %G'` shows what there is",
}
_IN_EXTRA = {
    "slurm.gpus_per_node": re.compile(r"gres|gpus|.*-per-gpu|gpus-per-.*|tres-.*"),
    "slurm.mem_mb_per_node": re.compile(r"mem|mem-per-.*"),
}
"""Options of `slurm.extra` that Slurm's words about a key may mean."""
_VERDICT = re.compile(r"\bJob \d+ to start at\b")
# True now, and perhaps not when the job's turn comes: Slurm queues such a job.
_PASSES = re.compile(
    r"DOWN, DRAINED or reserved|nodes are busy|unavailable state|begin time|dependency", re.I
)
_NO_ANSWER = re.compile(
    r"contact slurm|socket timed out|communication|configuration source|fetch config", re.I
)


def refused_keys(said: str) -> tuple[str, ...]:
    """Returns the configuration keys that sbatch's words are about; empty: they do not say. Pure."""
    # An option that is named, by Slurm or by the site, says more than Slurm's last sentence.
    if named := _named(said):
        return tuple(filter(None, map(_key_of, named)))
    if "node configuration" in said:
        return _OF_A_NODE
    if "node name" in said:
        return ("slurm.extra.nodelist", "slurm.extra.exclude")
    # The first match, in the table's order: sentences about other things mention partition, CPUs and nodes, too. The
    # last sentence is Slurm's own.
    for sentence in reversed(said.split("; ")):
        if found := [key for pattern, key in _KEYS if re.search(pattern, sentence, re.IGNORECASE)]:
            return (found[0],)
    return ()


def refusal(config: RunConfig, said: str) -> SlurmRefused:
    """Returns the error for a job that sbatch refuses, with the key that it is about."""
    keys = refused_keys(said)
    # What was not asked for cannot be what is too much.
    asked = [f"{key}={_value(config, key)}" for key in keys if _value(config, key) not in (0, "unset")]
    if keys and (meant := _IN_EXTRA.get(keys[0])):
        asked += [
            f"slurm.extra.{name}={value}"
            for name, value in config.slurm.extra.items()
            if meant.fullmatch(name)
        ]
    remedy = (
        _REMEDIES.get(keys[0]) if keys else "do as it says in the slurm section; `sinfo` shows what there is"
    )
    named = [f"--{option} is {_key_of(option) or 'written by submit itself'}" for option in _named(said)]
    if named:
        remedy = "; ".join([f"here {', '.join(named)}", *([remedy] if remedy else [])])
    return SlurmRefused(
        "Slurm does not take the job",
        where=", ".join(asked) or None,
        found=said,
        remedy=remedy or f"change {keys[0]}; `sinfo` shows what there is",
    )


def _key_of(option: str) -> str:
    """Returns the key for one of sbatch's options; empty: submit writes it, and no key does."""
    if option in ("account", "partition", "qos"):
        return f"slurm.{option}"
    return OWN_OPTIONS.get(option, f"slurm.extra.{option}")


def _named(said: str) -> list[str]:
    """Returns the options that the words name."""
    return list(dict.fromkeys(re.findall(r"(?<![\w-])--([a-z][a-z-]*[a-z])", said)))


def judge_script(config: RunConfig, script: str) -> tuple[str, list[str]]:
    """Returns sbatch's verdict on `script`: when it could start, or why that is not known now; and notes for the user.

    Raises:
        SlurmRefused: it would be refused.
        SlurmMissing: slurmctld does not answer.
    """
    program = shutil.which("sbatch")
    if program is None:
        raise SlurmMissing("there is no sbatch here", remedy="load Slurm's module, or use --cluster local")
    try:
        with waiting_for("sbatch --test-only", _TIMEOUT_S):
            done = subprocess.run(
                [program, "--test-only"],
                # On standard input: a dry run writes no file.
                input=script,
                # The environment of the real submission, whose verdict is asked for, but with messages in English.
                env=submission_environment(os.environ, config) | {"LC_ALL": "C"},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
            )
    except subprocess.TimeoutExpired:
        # No refusal: a controller that plans for long may well take the job.
        said = f"no answer within {_TIMEOUT_S:.0f} s: what Slurm thinks of the job is not known"
        return said, [f"sbatch --test-only: {said}"]
    lines = f"{done.stderr}\n{done.stdout}".splitlines()
    said = slurm_words("\n".join(lines)) or f"not a word, exit code {done.returncode}"
    if done.returncode == 0:
        # The others are the site's, from its plug-ins.
        verdict = [line for line in lines if _VERDICT.search(line)]
        words = slurm_words("\n".join(line for line in lines if line not in verdict)) if verdict else ""
        return slurm_words("\n".join(verdict)) or said, [f"sbatch says: {words}"] if words else []
    last = slurm_words(done.stderr.strip().rpartition("\n")[2])
    # slurmctld's silence says nothing about the job, so it is no refusal.
    if _NO_ANSWER.search(last):
        raise SlurmMissing(
            "Slurm does not answer", where="sbatch --test-only", found=said, remedy="see `scontrol ping`"
        )
    if _PASSES.search(last):
        return f"would wait: {said}", []
    raise refusal(config, said)


def _value(config: RunConfig, key: str) -> object:
    section, _, name = key.partition(".")
    if name.startswith("extra."):
        return config.slurm.extra.get(name.removeprefix("extra."), "unset")
    value = getattr(getattr(config, section), name)
    return "unset" if value is None else value
