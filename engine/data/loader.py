"""PromptLoader: the order in which prompts are used, and where in it a run stands."""

from collections.abc import Iterator, Sequence
from typing import Protocol, TypedDict

import numpy as np

from rolemesh.engine.data.files import DataError
from rolemesh.engine.data.sources import Source
from rolemesh.engine.protocol import DataProto


class LoaderState(TypedDict):
    """Where a loader stands: the next prompt is number `position` of `epoch`'s order, both from 0.

    The other entries are what the order follows from; `sources` has name, rows and rows per epoch of each.
    """

    epoch: int
    position: int
    seed: int
    shuffle: bool
    n_prompts: int
    sources: list[list[str | int]]


def epoch_order(
    n_prompts: int, seed: int, epoch: int, *, shuffle: bool = True, sources: Sequence[Source] = ()
) -> np.ndarray:
    """The prompt numbers in the order of one epoch: a function of its arguments alone.

    Each of `n_prompts` once, or what the `sources` give (always shuffled).
    """
    rng = np.random.default_rng([seed, epoch])
    if sources:
        return rng.permutation(np.concatenate([source.drawn(seed, epoch) for source in sources]))
    return rng.permutation(n_prompts) if shuffle else np.arange(n_prompts)


class Dataset(Protocol):
    """Numbered rows (prompts, or examples to learn from) that make batches."""

    def __len__(self) -> int: ...

    def collate(self, indices: Sequence[int]) -> DataProto: ...


class PromptLoader:
    """Batches of `batch_size` prompts. One pass over the loader is (what is left of) one epoch.

    The last batch of an epoch holds the prompts that are left over; with `drop_last` they are not used in
    that epoch, and `dropped_per_epoch` counts them. `sources` are used as often as their weights say.

    Raises:
        DataError: a batch size that gives no batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        sources: Sequence[Source] = (),
    ) -> None:
        n_prompts = sum(source.per_epoch for source in sources) if sources else len(dataset)
        if batch_size < 1 or (drop_last and batch_size > n_prompts):
            raise DataError(f"batches of {batch_size} from {n_prompts} prompts: none in an epoch")
        self.dataset, self.batch_size, self.seed, self.shuffle = dataset, batch_size, seed, shuffle
        self.sources, self.dropped_per_epoch = tuple(sources), n_prompts % batch_size if drop_last else 0
        self._n_used = n_prompts - self.dropped_per_epoch
        self.epoch, self.position = 0, 0

    def __len__(self) -> int:
        """Batches per epoch."""
        return -(-self._n_used // self.batch_size)

    def __iter__(self) -> Iterator[DataProto]:
        """The batches from here to the end of the epoch; the state is already past the one handed out."""
        order = epoch_order(
            len(self.dataset), self.seed, self.epoch, shuffle=self.shuffle, sources=self.sources
        )[: self._n_used]
        for start in range(self.position, self._n_used, self.batch_size):
            self.position = start + self.batch_size
            if self.position >= self._n_used:
                self.epoch, self.position = self.epoch + 1, 0
            yield self.dataset.collate(order[start : start + self.batch_size].tolist())

    def state_dict(self) -> LoaderState:
        """What `load_state_dict` needs to go on with the next batch."""
        return LoaderState(
            epoch=self.epoch,
            position=self.position,
            seed=self.seed,
            shuffle=self.shuffle,
            n_prompts=len(self.dataset),
            sources=[[source.name, len(source.rows), source.per_epoch] for source in self.sources],
        )

    def load_state_dict(self, state: LoaderState) -> None:
        """Go on where `state` was taken; the batch size may be another.

        Raises:
            DataError: the state of other prompts, weights or seed, whose order is not this one's.
        """
        here = self.state_dict()
        if any(state[name] != here[name] for name in ("seed", "shuffle", "n_prompts", "sources")):
            raise DataError(f"the saved position {state} belongs to another order of prompts than {here}")
        self.epoch, self.position = state["epoch"], state["position"]
