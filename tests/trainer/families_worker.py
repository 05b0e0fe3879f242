"""Run by test_family_runs under torchrun: `families_worker.py PLAN`, as lives_worker, but one run's failure is written
down beside it (RUN/failed) and the next run begins. A model is sharded layer by layer, as a large one is."""

import json
import os
import sys
import time
import traceback
from pathlib import Path

from tests.trainer.lives_worker import Lives, live_through
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.load import load_resolved
from verl_slurm.trainer.parallel import fsdp
from verl_slurm.trainer.place import Place, process_group


def main(plan: list[tuple[str, Lives]]) -> None:
    place = Place.from_environ(os.environ)
    fsdp._ONE_UNIT_BYTES = 0
    with process_group(load_resolved(RunPaths(plan[0][0]).run_yaml), place) as (device, ranks):
        for root, lives in plan:
            began = time.perf_counter()
            try:
                live_through(root, lives, place, device, ranks)
            except Exception:  # noqa: BLE001 - told by the test, with the name of the run
                Path(root, "failed").write_text(traceback.format_exc())
            if place.rank == 0:
                print(f"{Path(root).name} {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # torch 2.13 may abort at the interpreter's own end: wire.lifeline.run_and_leave
