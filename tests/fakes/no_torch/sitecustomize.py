"""On PYTHONPATH, it puts `rank_without_torch.py` in the place of the trainer's ranks, and changes nothing else."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

_RANK = Path(__file__).parents[1] / "rank_without_torch.py"


class _Finder:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return spec_from_file_location(name, _RANK) if name == "verl_slurm.trainer.__main__" else None


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
