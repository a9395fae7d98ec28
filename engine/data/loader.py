"""PromptLoader: the order in which prompts are used, and where in it a run stands."""

from collections.abc import Iterator
from typing import TypedDict

import numpy as np

from rolemesh.engine.data.files import DataError
from rolemesh.engine.data.prompts import PromptDataset
from rolemesh.engine.protocol import DataProto


class LoaderState(TypedDict):
    """Where a loader stands: the next prompt is number `position` of `epoch`'s order, both from 0."""

    epoch: int
    position: int
    seed: int
    n_prompts: int


def epoch_order(n_prompts: int, seed: int, epoch: int, *, shuffle: bool = True) -> np.ndarray:
    """The prompt numbers [n_prompts] in the order of one epoch: a function of its arguments alone."""
    return np.random.default_rng([seed, epoch]).permutation(n_prompts) if shuffle else np.arange(n_prompts)


class PromptLoader:
    """Batches of `batch_size` prompts. One pass over the loader is (what is left of) one epoch.

    The last batch of an epoch holds the prompts that are left over; with `drop_last` they are not used in
    that epoch, and `dropped_per_epoch` counts them.

    Raises:
        DataError: a batch size that gives no batch.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        if batch_size < 1 or (drop_last and batch_size > len(dataset)):
            raise DataError(f"batches of {batch_size} from {len(dataset)} prompts: none in an epoch")
        self.dataset, self.batch_size, self.seed, self.shuffle = dataset, batch_size, seed, shuffle
        self.dropped_per_epoch = len(dataset) % batch_size if drop_last else 0
        self.epoch, self.position = 0, 0

    def __len__(self) -> int:
        """Batches per epoch."""
        return -(-self._n_used // self.batch_size)

    @property
    def _n_used(self) -> int:
        return len(self.dataset) - self.dropped_per_epoch

    def __iter__(self) -> Iterator[DataProto]:
        """The batches from here to the end of the epoch; the state is already past the one handed out."""
        order = epoch_order(len(self.dataset), self.seed, self.epoch, shuffle=self.shuffle)[: self._n_used]
        for start in range(self.position, self._n_used, self.batch_size):
            self.position = start + self.batch_size
            if self.position >= self._n_used:
                self.epoch, self.position = self.epoch + 1, 0
            yield self.dataset.collate(order[start : start + self.batch_size].tolist())

    def state_dict(self) -> LoaderState:
        """What `load_state_dict` needs to go on with the next batch."""
        return LoaderState(
            epoch=self.epoch, position=self.position, seed=self.seed, n_prompts=len(self.dataset)
        )

    def load_state_dict(self, state: LoaderState) -> None:
        """Go on where `state` was taken; the batch size may be another.

        Raises:
            DataError: the state of another seed or number of prompts, whose order is not this one's.
        """
        here = self.state_dict()
        if (state["seed"], state["n_prompts"]) != (here["seed"], here["n_prompts"]):
            raise DataError(f"the saved position {state} belongs to another order of prompts than {here}")
        self.epoch, self.position = state["epoch"], state["position"]
