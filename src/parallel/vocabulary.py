"""The objective where logits are split by vocabulary: no rank ever holds all the logits of a token."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from src.batch import IGNORED
from src.objective import EvalSums, cross_entropy_sum, evaluation_sums


def split_cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """`cross_entropy_sum` of logits that may be a DTensor; within torch's `loss_parallel()`, until after backward.

    logits: (..., vocabulary), whole, or split on the last dim. Returns a plain scalar, the same on every rank of the
    axis.
    """
    loss = cross_entropy_sum(logits, targets)
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def split_evaluation_sums(logits: Tensor, targets: Tensor) -> EvalSums:
    """`evaluation_sums` of logits that may be a DTensor; within `loss_parallel()`.

    Of each rank's part only the largest logit and its place travel: 12 bytes a token and rank.
    """
    if not isinstance(logits, DTensor):
        return evaluation_sums(logits, targets)
    valid = targets != IGNORED
    hits = (split_argmax(logits) == targets) & valid
    return EvalSums(split_cross_entropy_sum(logits, targets).detach(), hits.sum(), valid.sum())


def split_argmax(logits: DTensor) -> Tensor:
    """The place of the largest on the last dim, (...), int64, plain; of equal ones the first.

    logits: (..., vocabulary), split on the last dim over a 1-D mesh.
    """
    assert logits.placements == (Shard(logits.ndim - 1),), logits.placements
    mesh, vocabulary = logits.device_mesh, logits.shape[-1]
    # DTensor splits as torch.chunk does: parts of ceil(vocabulary / ranks), the last ones shorter or empty.
    first = mesh.get_local_rank() * -(-vocabulary // mesh.size())
    part = logits.to_local().float()
    if part.shape[-1]:
        best, place = part.max(-1)
    else:
        best = part.new_full(part.shape[:-1], -torch.inf)
        place = torch.zeros_like(best, dtype=torch.int64)
    candidates = [_stacked(tensor, mesh.size(), mesh.get_group()) for tensor in (best, place + first)]
    winner = candidates[0].argmax(0, keepdim=True)
    return candidates[1].gather(0, winner).squeeze(0)


def _stacked(tensor: Tensor, size: int, group: torch.distributed.ProcessGroup) -> Tensor:
    """(ranks, ...): every rank's `tensor`."""
    parts = [torch.empty_like(tensor) for _ in range(size)]
    torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
    return torch.stack(parts)
