"""The former name of `verl_slurm.loops`: users' programs of runs that began earlier import it."""
