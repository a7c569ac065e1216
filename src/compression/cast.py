"""What fp16 and bf16 share: gradients are summed in 16 bits, by torch's own hook."""

from collections.abc import Callable
from typing import Any, ClassVar

from src.compression.base import Answer, Bucket, Compression
from src.compression.ledger import all_reduce_bytes
from src.compression.needs import Needs, Shapes, elements

BYTES = 2  # a value


class Cast(Compression):
    """Half the bytes of fp32; nothing is kept from step to step."""

    bears_loss_scale = True
    holds = "16-bit copies"
    hook_name: ClassVar[str]

    def compress(self, bucket: Bucket) -> Answer:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        buffer = bucket.buffer()
        self.ledger.add(all_reduce_bytes(buffer.numel() * BYTES, self.ranks.size), self.dense_bytes(buffer))
        hook: Callable[[Any, Bucket], Answer] = getattr(default_hooks, self.hook_name)
        return hook(self.ranks.group, bucket)

    def needs(self, shapes: Shapes, ranks: int) -> Needs:
        copy = BYTES * elements(shapes)
        return Needs(work=copy, sent=copy)

    def sent_formula(self, ranks: int) -> str:
        return f"{BYTES} bytes a gradient, once a step"

    def announcement(self) -> str:
        return f"compression: gradients are summed in {type(self).__name__.lower()}, half the bytes of fp32"
