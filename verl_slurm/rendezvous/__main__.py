"""The program that a rank of this run is started with: `python -P -m verl_slurm.rendezvous [-m] PROGRAM ARGS...`."""

from verl_slurm.rendezvous.rank_start import start

if __name__ == "__main__":
    start()
