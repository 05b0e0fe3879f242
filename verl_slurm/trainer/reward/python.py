"""Runs a user's function as the reward: loaded from the bytes that were hashed, and its results checked."""

import hashlib
import importlib
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from verl_slurm.base.bounded import SOURCE, TooMuch, read_regular
from verl_slurm.base.errors import ConfigError, DataError
from verl_slurm.config.reward_spec import RewardSpec, check_function, source_file

_SHOWN = 60
# The ranks load the run's copy of the code, so that a corrected file alone changes nothing.
_COPIED = "the ranks run a copy: set code.tree to the folder of all that the reward reads, or correct it"
_AGAIN = "submit the run again with --code new; it goes on from its newest checkpoint"


class RewardRaised(DataError):
    """The function raised. If it has worked before, the daemon tries again: its judge may have been away.

    Attributes:
        place: type and place of the error, without its text, which may differ each time.
        worked: the function has scored before, in this process.
    """

    place: str = ""
    worked: bool = False


class PythonReward:
    """A function (prompts, responses, answers) → one number per response; `name` stands in messages."""

    def __init__(self, function: Callable[..., object], name: str, source: bytes = b"") -> None:
        self._function, self._name, self._source = function, name, source
        self._worked = False

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]) -> Tensor:
        """Raises `DataError` unless the result is a list of finite numbers; `RewardRaised` where it fails."""
        try:
            # Copies: a function that changes its arguments must not change the trainer's.
            returned = self._function(list(prompts), list(responses), list(answers))
        # SystemExit, too: a judge that exits would end the rank without a word to the daemon.
        except (Exception, SystemExit) as error:
            # Without the text, which may have a time in it: the daemon compares it with the place of an earlier start.
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{frame.filename}:{frame.lineno}"
            raised = RewardRaised(
                "the reward function raised",
                where=self._name,
                found=f"{type(error).__name__}: {error} at {place}",
                # Messages name the user's own file, which is there.
                remedy=f"{_COPIED if isinstance(error, FileNotFoundError) else 'correct it'}, and {_AGAIN}",
            )
            raised.place, raised.worked = f"{type(error).__name__} at {place}", self._worked
            raise raised from error
        # Checked at each call: one NaN spoils all weights, is saved with them, and is noticed much later.
        scores = torch.tensor(self._numbers(returned, prompts, responses), dtype=torch.float32)
        # Only behind a good result: a function that never worked is wrong, one that did may fail for a while.
        self._worked = True
        return scores

    def light(self) -> dict[str, bytes]:
        """Returns its source."""
        return {"reward.py": self._source} if self._source else {}

    def _numbers(self, returned: object, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        if hasattr(returned, "tolist"):  # an array or a tensor
            returned = returned.tolist()
        if not isinstance(returned, list | tuple):
            raise self._refusal(f"{type(returned).__name__}", "a list of floats")
        if len(returned) != len(responses):
            missing = min(len(returned), len(responses) - 1)
            where = f"; the first without a score of its own is {_sample(missing, prompts, responses)}"
            found = f"{len(returned)} scores" + (where if len(returned) < len(responses) else "")
            raise self._refusal(found, f"{len(responses)} scores, one a response")
        for number, score in enumerate(returned):
            # bool is an int in Python, and a rule that answers True means 1.
            if not isinstance(score, numbers.Real):
                found = type(score).__name__
            # As float32, which the tensor has: a large float64 becomes infinite there.
            elif not math.isfinite(_float32(score)):
                found = str(score)
            else:
                continue
            raise self._refusal(f"{found} for {_sample(number, prompts, responses)}", "a finite number")
        return [float(score) for score in returned]

    def _refusal(self, found: str, expected: str) -> DataError:
        return DataError(
            "the reward function gave something that is no reward",
            where=self._name,
            found=found,
            expected=expected,
            remedy=f"correct the function, and {_AGAIN}",
        )


def load_python_reward(spec: RewardSpec, digest: str = "") -> PythonReward:
    """Runs the source and returns its function.

    Args:
        digest: that the source must have; empty: any.

    Raises:
        ConfigError, DataError: no such file or function, a source that cannot be run, or another one.
    """
    file = source_file(spec)
    # What can be said without running the code comes first, in words of our own.
    check_function(spec, file)
    # Read once, hashed and run from memory: the file may change between two reads.
    source = read_source(file)
    found = hashlib.sha256(source).hexdigest()
    if digest and found != digest:
        raise DataError(
            "the reward function's source is not what the first rank has",
            where=file,
            found=found,
            expected=digest,
            remedy="put it on a file system that all nodes see, and change it with verl-slurm update-reward only",
        )
    try:
        function = getattr(_run(spec, file, source, found), spec.function, None)
    except (Exception, SystemExit) as error:  # a judge that exits the process would end the training too
        raise DataError(
            "the reward function's source does not run",
            where=file,
            found=f"{type(error).__name__}: {error}",
            remedy=f"correct it (python -c 'import ...' in the job's environment says more), and {_AGAIN}",
        ) from error
    if not callable(function):
        raise ConfigError(
            "the reward is no function",
            where=f"model.reward: {spec}",
            found=type(function).__name__,
            expected="a function of (prompts, responses, answers)",
            remedy="set model.reward",
        )
    return PythonReward(function, str(spec), source)


def _run(spec: RewardSpec, file: Path, source: bytes, digest: str) -> ModuleType:
    """Returns the module of a source, named by its content: two versions of a source can coexist."""
    # Named by its content: an import of this process by the module's own name would be the former source.
    name = f"verl_slurm_reward_{digest[:16]}"
    parent = "" if spec.is_file else spec.name.rpartition(".")[0]
    # Behind all others: a neighbour called as one of our packages must not be taken for it.
    if spec.is_file and str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    if parent:
        # Relative imports of the source need their package.
        importlib.import_module(parent)
        name = f"{parent}.{name}"
    folders = [str(file.parent)] if not spec.is_file and file.name == "__init__.py" else None
    found = spec_from_file_location(name, file, submodule_search_locations=folders)
    assert found is not None
    module = module_from_spec(found)
    sys.modules[name] = module  # dataclasses and typing look it up there
    try:
        # Not found.loader: it may take an older __pycache__ instead of the bytes hashed here.
        exec(compile(source, str(file), "exec"), module.__dict__)  # noqa: S102 - this is what was asked for
    except BaseException:
        # A module that failed half-way must not be found by a second try.
        sys.modules.pop(name, None)
        raise
    return module


def read_source(file: Path) -> bytes:
    """Reads every byte. Raises `DataError`."""
    try:
        return read_regular(file, SOURCE, follow=True)
    except (OSError, TooMuch) as error:
        raise DataError(
            "the reward function's source cannot be read",
            where=file,
            found=getattr(error, "strerror", None) or error,
            remedy="every node must be able to read it",
        ) from error


def _float32(score: numbers.Real) -> float:
    try:
        return float(torch.tensor(float(score), dtype=torch.float32))
    except OverflowError:  # an int beyond all floats
        return math.inf


def _sample(number: int, prompts: Sequence[str], responses: Sequence[str]) -> str:
    shown = f"prompt {prompts[number][:_SHOWN]!r}, response {responses[number][:_SHOWN]!r}"
    return f"sample {number} of {len(responses)} ({shown})"
