"""The program that a rank of this run is started with; `rank_start` says how."""

from verl_slurm.loops.rendezvous.rank_start import start

if __name__ == "__main__":
    start()
