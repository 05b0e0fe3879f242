"""`python -m verl_slurm.dataset.prompts`: examines data with bounded memory; JSON on stdin and stdout.

It is a process of its own: a compressed page, a dictionary or a line of JSON may need a thousand times its size in
memory.
"""

import os
import resource
import sys

import msgspec

from verl_slurm.base.bounded import TooMuch
from verl_slurm.base.errors import DataError
from verl_slurm.base.one_line import json_line
from verl_slurm.dataset.prompts.look import PromptsRequest, WantedRows, look_at, look_at_rows

MAX_BYTES = 352 << 20
"""Limit of the process's own memory; pyarrow, a tokenizer and a row together need less than half of it."""


def main() -> int:
    """Returns 0 always: an error is an answer, too."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Not RLIMIT_AS: a thread reserves addresses that it never touches.
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wanted = msgspec.json.decode(sys.stdin.buffer.read(), type=PromptsRequest | WantedRows)
    try:
        answer: dict[str, object] = (
            {"look": look_at(wanted)}
            if isinstance(wanted, PromptsRequest)
            else {"rows": look_at_rows(wanted)}
        )
    except (OSError, TooMuch) as problem:
        answer = {"error": {"what": "a data file cannot be read", "found": str(problem)}}
    except DataError as error:
        parts = ("what", "where", "found", "expected", "remedy")
        said = {part: getattr(error, part) for part in parts}
        answer = {"error": {part: None if text is None else str(text) for part, text in said.items()}}
    # An answer, too: the data need more than a look may have, and the ranks read them without this limit.
    except MemoryError:
        answer = {"error": None}
    # Names of files and keys need not be UTF-8.
    sys.stdout.buffer.write(json_line(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
