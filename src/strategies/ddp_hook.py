"""A compressor as DistributedDataParallel's communication hook."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from src.compression.base import Answer, Bucket, Compression, Ranks
from src.compression.residuals import parameter_names
from src.footprint import FP32_BYTES
from src.strategies.base import Axis, Setting

MIB = 2**20


def hook_problems(setting: Setting) -> list[str]:
    """What DDP's own options do to a compressor that keeps something from step to step."""
    if setting.compressor is None or setting.compressor.keeps is None:
        return []
    name, keeps = setting.compressor.option(), setting.compressor.keeps
    found = []
    if setting.arguments.get("static_graph"):
        found.append(
            f"strategy.static_graph=true with compression={name}: torch makes its buckets anew after the first real"
            f" step, and {keeps} belongs to a bucket from the start. Use strategy.static_graph=false."
        )
    if setting.arguments.get("find_unused_parameters"):
        found.append(
            f"strategy.find_unused_parameters=true with compression={name}: in a step that does not use a parameter,"
            f" torch throws away {keeps} of it. Use strategy.find_unused_parameters=false, and freeze what is unused."
        )
    return found


def bucket_problems(model: nn.Module, setting: Setting) -> list[str]:
    """Whether a bucket of the model's gradients holds more than the compressor can number."""
    most = None if setting.compressor is None else setting.compressor.most_values
    if most is None:
        return []
    assert setting.compressor is not None
    sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    cap = int(setting.arguments.get("bucket_cap_mb", 25) * MIB)
    largest = max(bucket_sizes(sizes[::-1], cap), default=0)  # in backward's order, as `Hook.arrange` makes it
    if largest <= most:
        return []
    others = "a compression without indices (powersgd, fp16, bf16)"
    lower = "" if max(sizes) > most else f"Lower strategy.bucket_cap_mb={cap / MIB:g}, or use "
    return [
        f"compression={setting.compressor.option()} numbers up to {most:,} gradients of a bucket, and one holds"
        f" {largest:,}. {lower or 'Use '}{others}."
    ]


def bucket_sizes(sizes: Sequence[int], cap: int) -> Iterator[int]:
    """Gradients of each bucket, of parameters of such `sizes`. cap: bytes; the gradient that reaches it is the last."""
    held = 0
    for size in sizes:
        held += size
        if held * FP32_BYTES >= cap:
            yield held
            held = 0
    if held:
        yield held


class Hook:
    """What DDP calls with each bucket of gradients, once all of them are there; it takes DDP's averaging over."""

    def __init__(self, compression: Compression) -> None:
        self.compression = compression
        self.is_arranging = False

    def register(self, wrapped: DistributedDataParallel, axis: Axis) -> None:
        """Collective."""
        self.compression.begin(Ranks(axis.size, axis.group), parameter_names(wrapped.module))
        wrapped.register_comm_hook(self, answer_bucket)  # type: ignore[no-untyped-call]
        if self.compression.keeps is not None:
            self.arrange(wrapped)

    def arrange(self, wrapped: DistributedDataParallel) -> None:
        """Let DDP make its lasting buckets now, by a backward that touches all parameters, the last one first.

        It makes them after its first backward, in the order in which gradients came. What is sent depends on the
        buckets: a resumed run, whose first backward is a later step, would send something else than the unbroken one.
        """
        module = wrapped.module
        self.is_arranging = True
        kept = vars(module).get("forward")  # recomputation's, where all of a model is one unit
        compiled, module._compiled_call_impl = module._compiled_call_impl, None
        module.forward = lambda _: sum(p.sum() for p in module.parameters() if p.requires_grad)
        try:
            wrapped(None).backward()  # on GPUs torch 2.14 takes the first input without looking whether there is one
        finally:
            del module.forward
            if kept is not None:
                module.forward = kept
            module._compiled_call_impl = compiled
            self.is_arranging = False
        for parameter in module.parameters():
            parameter.grad = None


def answer_bucket(hook: Hook, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    if hook.is_arranging:
        answer: Answer = torch.futures.Future()
        answer.set_result(bucket.buffer())
        return answer
    return hook.compression.exchange(bucket)


def exchange_alone(compression: Compression, zeros: Sequence[Bucket]) -> Callable[[], None]:
    """What a step's exchanges take with nothing beside them, to be timed once. Collective.

    compression: begun. zeros: buckets of the reducer's, whose gradients are filled with noise: nothing stands out among
    zeros. A first exchange, for residuals, thresholds and Q, which are made once, is over when this returns.
    """
    draws = torch.Generator(zeros[0].buffer().device).manual_seed(dist.get_rank())  # not the training's

    def fill() -> None:
        for bucket in zeros:
            bucket.buffer().normal_(generator=draws)

    def exchange() -> None:
        for answer in [compression.exchange(bucket) for bucket in zeros]:  # under way at once, as DDP's
            answer.wait()

    fill()
    exchange()
    # From one step of a run to the next sums change little. Noise on top of noise would not fit the threshold.
    compression.residuals.put_back({})
    fill()
    return exchange
