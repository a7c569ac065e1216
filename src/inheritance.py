"""Who takes over what only one data rank had (`RankState`), where as many ranks go on, and where others do."""

import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from src.strategies.base import Axis
from src.strategies.run_state import RankState, State

if TYPE_CHECKING:
    from src.checkpoint.manifest import TensorInfo

log = logging.getLogger(__name__)

PREFIX = "rank."  # of names in a checkpoint: "rank.<data rank>.<the strategy's own name>"


def own_tensors(state: State, data_rank: int) -> dict[str, Tensor]:
    """What only this data rank has, by the checkpoint's names."""
    parts = () if state.of_rank is None else state.of_rank.parts
    return {f"{PREFIX}{data_rank}.{name}": tensor for part in parts for name, tensor in part.items()}


class Heir:
    """A data rank, and of which ranks of a checkpoint it is the heir: of those whose number is its own, modulo the
    number of ranks that go on. So nothing is lost, and nothing counts twice.

    num_saved: data ranks that saved. saved: the checkpoint's tensors.
    """

    def __init__(self, data: Axis, num_saved: int, saved: Mapping[str, "TensorInfo"]) -> None:
        self.same_ranks = num_saved == data.size
        self.num_saved, self.num_ranks = num_saved, data.size
        self.infos: dict[str, TensorInfo] = {}
        self.there_is_any = False
        for key, info in saved.items():
            if key.startswith(PREFIX):
                self.there_is_any = True
                if int(key.split(".")[1]) % data.size == data.rank:
                    self.infos[key] = info

    def tensors(self, state: State, device: torch.device) -> dict[str, Tensor]:
        """What is to be read of the checkpoint, still unread, by its names. state: of the strategy that goes on."""
        if state.of_rank is None:
            if self.there_is_any:
                log.info(
                    "what each rank kept for itself (unsent gradients) is left in the checkpoint: no use for it here"
                )
            return {}
        if self.there_is_any and not self.same_ranks:
            log.info(
                "%d ranks kept unsent gradients, %d go on: they are added up, what else each kept begins anew",
                self.num_saved,
                self.num_ranks,
            )
        return {
            key: torch.zeros(info.shape, dtype=getattr(torch, info.dtype), device=device)
            for key, info in self.infos.items()
        }

    def rank_state(self, read: Mapping[str, Tensor]) -> RankState:
        """What the strategy takes over. read: `tensors`, filled."""
        parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, tensor in read.items():
            _, saved_rank, name = key.split(".", 2)
            parts[saved_rank][name] = tensor
        return RankState(tuple(parts.values()), self.same_ranks)
