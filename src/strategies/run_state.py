"""What a run needs to go on, to be saved and taken over: of the whole model, and of one data rank alone."""

from typing import Any, NamedTuple

from torch import Tensor


class RankState(NamedTuple):
    """What only one data rank has, such as the gradients that it has not sent yet.

    parts: of `state()`, this rank's alone, by names of the strategy's own; for `load_state`, those of the ranks whose
    heir this one is. same_ranks: as many ranks saved as now load, each heir of the one with its number.
    """

    parts: tuple[dict[str, Tensor], ...]
    same_ranks: bool = True


class State(NamedTuple):
    """Of a run under any strategy, by the bare model's names.

    tensors: "model.<name>" for weights and persistent buffers (weights in fp32 whatever the precision),
    "optimizer.<name>.<slot>" for the optimizer's ("exp_avg", "momentum_buffer" ...), zeros before its first step; each
    whole and the same on all ranks that have it, or a DTensor that is split over them. Of shape (1,) where the model's
    has no dim. A rank may lack what others have (stages). Filling them in place may or may not reach the strategy:
    `load_state` makes sure. Learning rates and the like are no state: they are today's configuration's.
    plain: JSON's types only, of the whole model on every rank: {"steps": {name: optimizer steps taken, of parameters
    whose optimizer counts them, or that never took one}, "scaler": {"scale", "growth_tracker" ...} where there is one}.
    """

    tensors: dict[str, Tensor]
    plain: dict[str, Any]
    of_rank: RankState | None = None  # None: ranks have nothing of their own
