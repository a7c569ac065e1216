"""What a strategy keeps on one data rank alone, to be saved and taken over."""

from typing import NamedTuple

from torch import Tensor


class RankState(NamedTuple):
    """What only one data rank has, such as the gradients that it has not sent yet.

    parts: of `state()`, this rank's alone, by names of the strategy's own; for `load_state`, those of the ranks whose
    heir this one is. same_ranks: as many ranks saved as now load, each heir of the one with its number.
    """

    parts: tuple[dict[str, Tensor], ...]
    same_ranks: bool = True
