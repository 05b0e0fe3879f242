"""Submission: the order of it, and what is refused before a job is queued.

`verl_slurm.submit(...)` is `verl_slurm.api.submit`: once this package is imported, the name stands for the package.
"""

import sys
from types import ModuleType
from typing import Any


class _Submit(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from importlib import import_module

        # By its name: the interface lies above this package.
        return import_module("verl_slurm.api").submit(*args, **kwargs)


sys.modules[__name__].__class__ = _Submit
