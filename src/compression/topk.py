"""compression=topk: only the largest gradients travel; the others wait (Aji and Heafield 2017; Stich et al. 2018)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from src.compression.base import Answer, Bucket, Compression, Plain, Ranks, named
from src.compression.ledger import INDEX_BYTES, all_gather_bytes, break_even_density
from src.compression.needs import Needs, Shapes, elements
from src.compression.selection import ImaginedSampled, Sampled, count_of, largest
from src.footprint import FP32_BYTES

INT64_BYTES = 8
SELECTIONS = ("exact", "sampled")


class TopK(Compression):
    """ratio: of each bucket's values. warmup_steps: dense ones at the beginning. selection: exact or sampled.

    What arrives is added rank by rank, in the same order everywhere, so all ranks hold the same bits.
    """

    keeps = "what was not sent"
    collective = "all_gather"
    holds = "residuals, magnitudes, values and indices"
    most_values = 2**31 - 1  # that an int32 can number
    sampler: type[Sampled] = Sampled

    def __init__(
        self, ratio: float = 0.01, error_feedback: bool = True, warmup_steps: int = 0, selection: str = "exact"
    ) -> None:
        self.refuse_problems(ratio=ratio, warmup_steps=warmup_steps, selection=selection)
        self.ratio, self.error_feedback = ratio, error_feedback
        self.warmup_steps, self.selection = warmup_steps, selection

    @classmethod
    def problems(cls, arguments: Mapping[str, Any]) -> list[str]:
        ratio, warmup = arguments.get("ratio", 0.01), arguments.get("warmup_steps", 0)
        selection = arguments.get("selection", "exact")
        found = []
        if not 0 < ratio <= 1:
            found.append(f"compression.ratio={ratio} is no share of the values. Choose more than 0, at most 1.")
        if warmup < 0:
            found.append(f"compression.warmup_steps={warmup} is no number of steps. Choose 0 or more.")
        if selection not in SELECTIONS:
            found.append(f"compression.selection={selection} is unknown. Choose {' or '.join(SELECTIONS)}.")
        return found

    def begin(self, ranks: Ranks, names: Mapping[Tensor, str]) -> None:
        super().begin(ranks, names)
        self.sampled = self.sampler()

    def announcement(self) -> str:
        most = break_even_density(self.ranks.size)
        line = (
            f"compression: the largest {self.ratio:g} of each bucket; from {most:.3g} on {self.ranks.size} rank(s)"
            " would send more than without compression"
        )
        if self.selection == "sampled" and any(parameter.device.type == "cuda" for parameter in self.residuals.names):
            line += (
                ". compression.selection=sampled is made for CPUs: it waits for the GPU several times a bucket, and"
                " compression.selection=exact never does"
            )
        return line

    def needs(self, shapes: Shapes, ranks: int) -> Needs:
        numel = elements(shapes)
        count = count_of(self.ratio, numel)
        share = Payload(count, torch.float32).num_bytes
        once = 0
        if count == numel:
            choosing = INT64_BYTES * numel
        elif self.selection == "exact":  # all magnitudes; the largest and their indices
            choosing = FP32_BYTES * numel + (FP32_BYTES + INT64_BYTES) * count
        else:  # two masks; indices beyond the threshold, their magnitudes; the largest of these, twice their indices
            once, choosing = 2 * numel, (2 * FP32_BYTES + 3 * INT64_BYTES) * count
        packing = (FP32_BYTES + INT64_BYTES) * count + share
        kept = FP32_BYTES * numel if self.error_feedback else 0
        return Needs(kept, once, max(choosing, packing, (1 + ranks) * share), ranks * share)

    def sent_formula(self, ranks: int) -> str:
        return (
            f"{ranks} ranks x {self.ratio:g} of the gradients x ({FP32_BYTES} + {INDEX_BYTES}); as much as without"
            f" compression from a ratio of {break_even_density(ranks):.3g} on"
        )

    def compress(self, bucket: Bucket) -> Answer:
        if self.ledger.steps < self.warmup_steps:
            return self.dense(bucket)
        packed, payload = self.share(bucket)
        self.ledger.add(all_gather_bytes(packed.numel(), self.ranks.size), self.dense_bytes(bucket.buffer()))
        return self.gather(packed, payload, bucket.buffer())

    def share(self, bucket: Bucket) -> tuple[Tensor, "Payload"]:
        """What this rank sends of a bucket, packed; the rest is kept, where it is kept. Spoils the bucket's buffer."""
        buffer = bucket.buffer()
        assert buffer.numel() <= self.most_values, "refused by src/strategies/ddp_hook.py"
        if self.error_feedback:
            # In shares of the mean, not of the sum: the number of ranks may be another after a resume.
            values = self.residuals.of(bucket.index(), buffer, bucket.parameters())
            values.add_(buffer, alpha=1 / self.ranks.size)
        else:
            values = buffer.div_(self.ranks.size)
        count = count_of(self.ratio, values.numel())
        indices = self.select(bucket, values, count)
        payload = Payload(count, values.dtype)
        packed = payload.pack(values[indices], indices)
        if self.error_feedback:
            values.index_fill_(0, indices, 0)
        return packed, payload

    def select(self, bucket: Bucket, values: Tensor, count: int) -> Tensor:
        if count == values.numel():
            return torch.arange(count, device=values.device)
        if self.selection == "exact":
            return largest(values, count)
        bucket_name = self.residuals.names[bucket.parameters()[0]]
        return self.sampled.select(bucket_name, values, count, self.ledger.steps)

    def gather(self, packed: Tensor, payload: "Payload", buffer: Tensor) -> Answer:
        """The sum of all ranks' packed values, in `buffer`."""
        received = packed.new_empty(self.ranks.size * packed.numel())
        work = dist.all_gather_single(received, packed, group=self.ranks.group, async_op=True)
        assert work is not None

        def add_up(_: Any) -> Tensor:
            buffer.zero_()
            for share in received.view(self.ranks.size, -1):
                values, indices = payload.unpack(share)
                buffer.index_add_(0, indices, values)
            return buffer

        return work.get_future().then(add_up)  # type: ignore[no-any-return]

    def imagined(self) -> Compression:
        other = super().imagined()
        assert isinstance(other, TopK)
        other.sampler = ImaginedSampled
        return other

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {
            f"threshold.{name}": torch.tensor([threshold], dtype=torch.float64)
            for name, threshold in self.sampled.thresholds.items()
        }

    def go_on_from(self, parts: Sequence[Mapping[str, Tensor]], same_ranks: bool, plain: Plain | None) -> None:
        super().go_on_from(parts, same_ranks, plain)
        found = named(parts[0], "threshold") if same_ranks else {}
        self.sampled.thresholds = {name: float(threshold) for name, threshold in found.items()}


class Payload:
    """One rank's share of a bucket as bytes: `count` values, then as many int32 indices.

    What is fewer is filled up by zeros, to be added to the first value.
    """

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.count, self.dtype = count, dtype
        align = max(INDEX_BYTES, dtype.itemsize)
        self.values_end = rounded_up(count * dtype.itemsize, align)
        self.num_bytes = rounded_up(self.values_end + count * INDEX_BYTES, align)

    def pack(self, values: Tensor, indices: Tensor) -> Tensor:
        packed = torch.zeros(self.num_bytes, dtype=torch.uint8, device=values.device)
        held_values, held_indices = self.unpack(packed)
        held_values[: len(values)] = values
        held_indices[: len(indices)] = indices
        return packed

    def unpack(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Views: values and indices, each of shape (count,)."""
        values = packed[: self.count * self.dtype.itemsize].view(self.dtype)
        indices = packed[self.values_end : self.values_end + self.count * INDEX_BYTES].view(torch.int32)
        return values, indices


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
