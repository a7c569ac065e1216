"""How a GPT, or a stage of one, is split over a tensor-parallel axis (Megatron-LM, Shoeybi et al. 2019, section 3).

Column then row: query, key, value and the MLP's first layer by their outputs, so that each rank has whole heads and
whole hidden units; the layers after them by their inputs, whose partial sums meet in one all-reduce. Under sequence
parallelism that all-reduce becomes a reduce-scatter and, before the next columns, an all-gather: the same bytes, and
norms, dropout and the residual stream hold only this rank's part of each sequence.
"""

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from src.models.gpt import GPT
from src.parallel.plan import Both, OwnDraws, Plan
from src.parallel.tensor import VocabularyParallel, Whole


def plan(model: GPT, sequence_parallel: bool) -> Plan:
    """A style for each module of `model` that has parameters."""
    stream: Placement = Shard(1) if sequence_parallel else Replicate()  # (batch, sequence, width)
    styles: Plan = {}
    if model.embedding is not None:
        styles["embedding"] = VocabularyParallel(stream)
    if model.positions is not None:
        styles["positions"] = Whole(Replicate(), Shard(0) if sequence_parallel else Replicate())  # (sequence, width)
    if len(model.blocks):
        styles |= {f"blocks.*.{name}": style for name, style in block_plan(stream).items()}
    if model.norm is not None:
        styles["norm"] = Whole(stream)
    if model.head is not None:
        styles["head"] = ColwiseParallel(input_layouts=stream, use_local_output=False)
    if model.dropout:
        # What works on parts: everything under sequence parallelism, else the heads.
        where = "" if sequence_parallel else "blocks.*.attention"
        styles[where] = Both(styles[where], OwnDraws()) if where in styles else OwnDraws()
    return styles


def block_plan(stream: Placement) -> dict[str, ParallelStyle]:
    """Of one block, by the names within it."""
    # Gathered once for query, key and value, whose input gradients then add up before they are reduced.
    gather = PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate(), use_local_output=False)
    return {
        "attention_norm": Whole(stream),
        "attention": gather,
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.o": RowwiseParallel(output_layouts=stream),
        "mlp_norm": Whole(stream),
        "mlp": gather,
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=stream),
    }
