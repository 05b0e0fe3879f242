from verl_slurm.api import Run as Run, RunStatus as RunStatus, submit as submit
from verl_slurm.loops.plain import run as run

__version__: str
