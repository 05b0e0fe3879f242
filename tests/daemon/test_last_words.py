"""What a program's log says of its end: the error and not what surrounds it, whole."""

from pathlib import Path

import pytest
from verl_slurm_daemon.agent.last_words import last_words

ENDED = "verl-slurm: rank 1 (local rank 1, pid 7) ended with exitcode 2"
KILLED = "verl-slurm: rank 1 (local rank 1, pid 7) was ended by Signal 9 (SIGKILL): memory"
WARNING = '/e/__init__.py:41: UserWarning: none: ModuleNotFoundError("no veomni")\n  warnings.warn("none")\n'
ON_WELL = "".join(f"step {number}: loss 0.1, 0 Errors\n" for number in range(40))
PEER = "[rank{0}]: RuntimeError: Connection closed by peer [127.0.0.1]:1{0}4"
MIXTURE = "the mixture does not add up:\n  web 0.50\n  code 0.30\n    books 0.10\nset mixture.normalize, or correct it"
LMOD = (
    'Lmod has detected the following error:  The following module(s) are unknown: "cuda/12.9"\n\n'
    'Please check the spelling. Also try "module spider ..."\nIt may help to try:\n  $ module load "cuda/12.9"\n\n'
    "Also make sure that all modulefiles start with the string #%Module\n"
)
GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/u/group.py", line 7, in f
  |     raise ExceptionGroup("2 shards failed", errors)
  | ExceptionGroup: 2 shards failed (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/u/group.py", line 5, in f
    |     read(shard)
    | ValueError: no magic number
    +---------------- 2 ----------------
    | KeyError: 'answer'
    +------------------------------------
"""
BOX = """╭────────────────────────────── Traceback (most recent call last) ─────────────────────────────╮
│ /u/train.py:5 in step                                                                         │
│ ❱ 5 │   raise ValueError("learning rate must be below 1")                                     │
╰──────────────────────────────────────────────────────────────────────────────────────────────╯
ValueError: learning rate must be below 1
"""
DUMP = """Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/v/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/u/train.py", line 4 in load
  File "/u/train.py", line 9 in <module>

Extension modules: numpy (total: 1)
"""


def trace(error: str, place: str = 'File "/u/train.py", line 4, in load', margin: str = "") -> str:
    """As Python prints one; the library's frame is the last."""
    lines = f"Traceback (most recent call last):\n  {place}\n    raise ValueError(text)\n    ^^^^^^"
    library = '\n  File "/v/lib/python3.11/site-packages/torch/x.py", line 3, in call\n    f(a)\n'
    return "".join(f"{margin}{line}\n" for line in (lines + library + error).splitlines())


PLACE = 'File "/u/train.py", line 4, in load'


@pytest.mark.parametrize(
    ("log", "told"),
    [
        pytest.param("a\nb\n", "a / b", id="nothing that looks like an error"),
        pytest.param(f"step 3\n{KILLED}\n", KILLED, id="a kill"),
        pytest.param(trace("KeyError: 1") + ON_WELL + KILLED, KILLED, id="a kill long after an error"),
        pytest.param(trace("KeyError: 1") + KILLED, f"{PLACE} / KeyError: 1 / {KILLED}", id="kills itself"),
        pytest.param(
            f"{WARNING * 9}\x1b[36mray.exceptions.ActorDiedError\x1b[39m: It died\x1b[K\n{WARNING * 9}",
            "ray.exceptions.ActorDiedError: It died",
            id="warnings that name errors, and colours",
        ),
        pytest.param(f"Fehler: Datei fehlt\n{ENDED}", f"Fehler: Datei fehlt / {ENDED}", id="German"),
        pytest.param(
            trace(f"ValueError: {MIXTURE}"),
            f"{PLACE} / ValueError: {' / '.join(line.strip() for line in MIXTURE.splitlines())}",
            id="a message of many lines",
        ),
        pytest.param(
            f"x.py: error: retrying\nrecovered\n{ON_WELL}loss is NaN, stopping\n{ENDED}",
            f"x.py: error: retrying / recovered / step 0: loss 0.1, 0 Errors / loss is NaN, stopping / {ENDED}",
            id="an error that was none, and a last word",
        ),
        pytest.param(
            f"OSError: No space left on device\n{ON_WELL}{trace('ValueError: bad batch')}{ENDED}",
            f"step 39: loss 0.1, 0 Errors / {PLACE} / ValueError: bad batch / {ENDED}",
            id="an error of before",
        ),
        pytest.param(
            f"{trace('ValueError: no row 7')}Exception ignored in: <function A.__del__>\n{trace('OSError: closed')}",
            f"{PLACE} / ValueError: no row 7",
            id="an exception that Python ignored",
        ),
        pytest.param(
            trace("ValueError: row 7", margin="[rank1]: ")
            + "".join(f"{PEER.format(n)}\n" for n in range(60)),
            f"{PLACE} / [rank1]: ValueError: row 7 / {PEER.format(0)}",
            id="a rank, and those that fail because of it",
        ),
        pytest.param(
            "".join(
                trace(f"{name}Error: {name}", f'File "/u/{name}.py", line 1, in f') for name in "abcdefghi"
            ),
            " / ".join(f'File "/u/{name}.py", line 1, in f / {name}Error: {name}' for name in "abfghi"),
            id="errors that are too many: the first and the last",
        ),
        pytest.param(
            trace("Diverged: loss is NaN"), f"{PLACE} / Diverged: loss is NaN", id="its own exception"
        ),
        pytest.param(
            trace("RuntimeWarning: overflow"), f"{PLACE} / RuntimeWarning: overflow", id="a warning raised"
        ),
        pytest.param(
            f"bad magic number at byte 12\n{trace('CalledProcessError: exit status 3')}",
            f"bad magic number at byte 12 / {PLACE} / CalledProcessError: exit status 3",
            id="a child's words before its parent's",
        ),
        pytest.param(
            f"ERROR:root:no batch of step 7\n{trace('KeyError: 1')}wandb: Synced\n{ENDED}",
            f"ERROR:root:no batch of step 7 / {PLACE} / KeyError: 1 / wandb: Synced / {ENDED}",
            id="what was logged with it, and said behind it",
        ),
        pytest.param(
            "step 3\n 33%|███ | 1/3 [00:01<?]\r 66%|███ | 2/3 [00:02<?]\rNaN at step 2\r\n",
            "step 3 / NaN at step 2",
            id="a progress bar",
        ),
        pytest.param(
            f"RuntimeError: {'x' * 900} end", f"RuntimeError: {'x' * 386} ... {'x' * 196} end", id="long"
        ),
        pytest.param(LMOD, " / ".join(line.strip() for line in LMOD.splitlines() if line), id="Lmod"),
        pytest.param(
            "Could not override 'a.b'.\nKey 'b' is not in struct\n    full_key: a.b\n    object_type=dict\n\n"
            "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n",
            "Could not override 'a.b'. / Key 'b' is not in struct / full_key: a.b / object_type=dict",
            id="Hydra",
        ),
        pytest.param(
            GROUP,
            'File "/u/group.py", line 7, in f / | ExceptionGroup: 2 shards failed (2 sub-exceptions) / '
            "| ValueError: no magic number / | KeyError: 'answer'",
            id="a group of exceptions",
        ),
        pytest.param(BOX, "/u/train.py:5 in step / ValueError: learning rate must be below 1", id="rich"),
        pytest.param(
            DUMP,
            'Fatal Python error: Segmentation fault / File "/u/train.py", line 4 in load / '
            "Extension modules: numpy (total: 1)",
            id="faulthandler",
        ),
    ],
)
def test_the_last_words_are_the_error_and_not_what_surrounds_it(tmp_path: Path, log: str, told: str) -> None:
    file = tmp_path / "log"
    file.write_text(log)
    assert last_words(file) == told
