from verl_slurm.api import Run as Run
from verl_slurm.api import RunStatus as RunStatus
from verl_slurm.api import submit as submit
from verl_slurm.loops.plain import run as run

__version__: str
