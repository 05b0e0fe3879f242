"""A `DataLoader` that can resume in the middle of an epoch, with exactly the remaining batches.

A loader's output is a function of two things. One is the random generators at the start of its epoch (the order of the
samples, the seeds of its workers), the other the draws of its dataset and its collate function. So a resume restores
the generators of the epoch's start, loads the batches that were trained on once more and drops them. Then it restores
the generators of the save. That costs the loading time of those batches. It holds with workers, random augmentation and
any sampler that is reproducible itself.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from verl_slurm.save.ranks import rng
from verl_slurm.save.ranks.rng import Generators


class ResumableDataLoader(DataLoader[Any]):
    """`torch.utils.data.DataLoader`, unchanged but resumable. Iterate over one epoch at a time.

    Lightning also accepts it as stateful (`state_dict`, `load_state_dict`). A single process needs no more. Of several
    ranks Lightning saves the first one's only, and `loops.lightning` handles the others.

    Attributes:
        epoch_began: the generators at the start of the running or last epoch; None: none began.
        served: batches of it that were handed out.
    """

    epoch_began: Generators | None = None
    served: int = 0
    _to_resume: tuple[int, Generators, Generators] | None = None

    def resume(self, served: int, epoch_began: Generators, then: Generators) -> None:
        """Makes the next epoch continue one that was begun before.

        Args:
            served: batches of it that were trained on.
            epoch_began: the generators at its start.
            then: the generators after those batches, and after the work on them.
        """
        self._to_resume = (served, epoch_began, then)

    def forget(self) -> None:
        """Makes the next epoch begin from its start after all."""
        self._to_resume = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # For one epoch: the next begins from its start.
        todo, self._to_resume = self._to_resume, None
        skipped = 0
        if todo is not None:
            skipped, began, _ = todo
            # Before `super().__iter__`: that draws the order of the samples and the seeds of the workers.
            rng.restore(began)
        # The generators of the epoch's true start, so that a second interruption can resume from here, too.
        self.epoch_began, self.served = rng.capture(), skipped
        batches = super().__iter__()
        if todo is not None:
            # Loaded and dropped: data sets and collate functions draw from the generators, so skipping indices is not
            # enough.
            for _ in islice(batches, skipped):
                pass
            # Undoes what the loading above has drawn; the training goes on where the saved step left off.
            rng.restore(todo[2])
        for batch in batches:
            # Before the yield: a save inside of the step counts this batch as trained on.
            self.served += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for Lightning: loadable with `torch.load(weights_only=True)`."""
        if self.epoch_began is None:
            return {}
        return {
            "served": self.served,
            "epoch_began": rng.to_tensors(self.epoch_began),
            # As tensors: `torch.load(weights_only=True)` refuses arrays.
            "then": rng.to_tensors(rng.capture()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            began, then = rng.from_tensors(state["epoch_began"]), rng.from_tensors(state["then"])
            self.resume(int(state["served"]), began, then)
