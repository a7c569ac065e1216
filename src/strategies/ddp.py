"""strategy=ddp: DistributedDataParallel (Li et al. 2020, "PyTorch Distributed", VLDB).

Every rank holds the whole model; gradients are all-reduced in buckets while backward still runs.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from src.batch import MicroBatch
from src.compression.base import Compression
from src.footprint import Footprint, ModelSizes, Part
from src.parallel.batchnorm import synchronize_batchnorm
from src.strategies.autograd import AutogradStrategy, average_buffers, whole_weights
from src.strategies.base import BuildSpec, Setting, Support
from src.strategies.compressed_footprint import compressed
from src.strategies.ddp_hook import Hook, bucket_problems, exchange_alone, hook_problems
from src.strategies.footprint import Shares, gradients_as_they_come, states
from src.strategies.run_state import RankState, State

log = logging.getLogger(__name__)


class DDP(AutogradStrategy):
    """bucket_cap_mb: MiB a bucket. sync_batchnorm: of all ranks. The others are DistributedDataParallel's own.

    static_graph: torch 2.14 records the graph in the very first backward, and only where gradients meet in it: under
    `no_sync` its reducer fails an assertion. So that one all-reduces too, whatever the accumulation.
    """

    supports = Support(
        layout="keeps a whole copy on every rank",
        sharding=frozenset({"none"}),
        omits="the all-reduces of gradients",
        compresses=True,
        compiles=True,
    )
    model: DistributedDataParallel
    synchronizes = True  # but in `unsynchronized`
    compression: Compression | None = None

    def __init__(
        self,
        bucket_cap_mb: float = 25,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        forward_sync_buffers: bool = True,
        sync_batchnorm: bool = False,
    ) -> None:
        self.options: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "find_unused_parameters": find_unused_parameters,
            "forward_sync_buffers": forward_sync_buffers,
        }
        self.sync_batchnorm = sync_batchnorm
        self.graph_is_due = static_graph  # to be recorded
        self.checked_for_unused = find_unused_parameters
        self.wrapper: type[DistributedDataParallel] = DistributedDataParallel

    @classmethod
    def problems(cls, setting: Setting) -> list[str]:
        found = hook_problems(setting)
        bucket_cap_mb = setting.arguments.get("bucket_cap_mb", 1)
        if bucket_cap_mb <= 0:
            found.append(f"strategy.bucket_cap_mb={bucket_cap_mb} holds no gradient; choose more than 0.")
        return found

    @classmethod
    def model_problems(cls, model: nn.Module, setting: Setting) -> list[str]:
        return bucket_problems(model, setting)

    @classmethod
    def footprint(cls, sizes: ModelSizes, setting: Setting, world_rank: int = 0) -> Footprint:
        held = states(sizes, setting, Shares())
        gradients = held.gradients.bytes
        is_view = setting.arguments.get("gradient_as_bucket_view", True)
        # The reducer's buckets stay allocated between steps. The first micro-batches' gradients, which don't meet, are
        # outside of them even where those that do are their views.
        beside = sizes.most_activations if is_view else gradients_as_they_come(sizes, setting)
        if is_view and setting.accumulate > 1:
            beside += gradients
        are_gradients = is_view and setting.accumulate == 1
        buckets = Part(
            0 if are_gradients else gradients,
            "the gradients are views of the buckets" if are_gradients else f"buckets for {sizes.trained:,} gradients",
        )
        sums = {"all_reduce": Part(gradients, f"4 x {sizes.trained:,} gradients, once a step")}
        dense = held.footprint(
            gradients + beside,
            "weights, optimizer states, the reducer's buckets, and the most of activations and gradients",
            in_update=buckets.bytes,
            buffers=buckets,
            traffic=sums if setting.data_parallel_size > 1 else {},
        )
        return compressed(dense, held)

    def wrap(self, model: nn.Module, spec: BuildSpec) -> nn.Module:
        # DDP averages gradients over the ranks; the step's loss is a sum of the ranks' shares.
        self.gradient_factor = float(spec.world.world_size)
        if self.sync_batchnorm:  # before wrapping: DDP would not know the parameters of modules that come later
            model = synchronize_batchnorm(model, spec.world.device)
        # Weights in the layout of the images, where the model says so: gradients come in it, and DDP's buckets then
        # take them without a copy (and a warning).
        memory_format = getattr(model, "memory_format", torch.preserve_format)
        model = model.to(spec.world.device, memory_format=memory_format)  # type: ignore[call-overload]
        device_ids = [spec.world.device.index] if spec.world.device.type == "cuda" else None
        wrapped = self.wrapper(model, device_ids=device_ids, **self.options)
        if spec.compression is not None:
            self.compression = spec.compression
            Hook(self.compression).register(wrapped, self.data)
            if spec.world.is_main:
                log.info(self.compression.announcement())
        return wrapped

    def imagined(self) -> "DDP":
        from src.strategies.ddp_imagined import ImaginedDDP

        made = copy.copy(self)
        made.wrapper = ImaginedDDP
        return made

    def gradient_sync(self, is_last: bool) -> AbstractContextManager[None]:
        # What later micro-batches add to has met already: the mean of equals is the same, however often they meet.
        syncs, self.graph_is_due = (is_last and self.synchronizes) or self.graph_is_due, False
        return nullcontext() if syncs else self.model.no_sync()

    @contextmanager
    def unsynchronized(self) -> Iterator[None]:
        buffers_are_due = self.model.require_forward_param_sync
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True
            # A forward under no_sync tells the next one to leave the buffers as they are.
            self.model.require_forward_param_sync = buffers_are_due

    def synchronization_alone(self, num_microbatches: int) -> Callable[[], None]:
        # Only the reducer knows its buckets, which are made anew after the first step.
        # Private in torch 2.14: in public they come to a communication hook alone, itself part of the step.
        zeros = self.model.reducer._get_zeros_like_grad_buckets()
        if self.compression is not None:
            return exchange_alone(self.compression.timed(), zeros)
        buckets = [bucket.buffer() for bucket in zeros]

        def all_reduce() -> None:
            for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:  # under way at once, as DDP's
                work.wait()

        return all_reduce

    def forward_backward(self, microbatches: Sequence[MicroBatch], valid_targets: int | Tensor) -> Tensor | None:
        loss = super().forward_backward(microbatches, valid_targets)
        if not self.checked_for_unused:
            self.refuse_unused_parameters()
            self.checked_for_unused = True
        return loss

    def refuse_unused_parameters(self) -> None:
        """After the first backward, name what took no part; torch names no parameter, and only a step later."""
        unused = [n for n, p in self.model.module.named_parameters() if p.requires_grad and p.grad is None]
        if unused:
            raise ValueError(
                f"{len(unused)} parameters took no part in the loss: {', '.join(unused)}. DDP would wait for their"
                " gradients. Set strategy.find_unused_parameters=true, or freeze or remove them."
            )

    def weights(self) -> dict[str, Tensor] | None:
        average_buffers(self.model, self.data)
        return whole_weights(self.model.module) if self.spec.world.is_main else None

    def bare_modules(self) -> list[nn.Module]:
        return [self.model.module]

    def state(self) -> State:
        state = super().state()
        if self.compression is None:
            return state
        plain = {**state.plain, "compression": dict(self.compression.plain())}
        return State(state.tensors, plain, RankState((self.compression.tensors(),)))

    def load_state(self, state: State) -> None:
        super().load_state(state)
        if self.compression is not None:
            parts, same_ranks = RankState(()) if state.of_rank is None else state.of_rank
            self.compression.go_on_from(parts, same_ranks and len(parts) == 1, state.plain.get("compression"))

    def remember(self) -> None:
        super().remember()
        if self.compression is not None:
            self.compression.remember()

    def discard(self) -> None:
        super().discard()
        if self.compression is not None:
            self.compression.discard()

    def extra_metrics(self) -> dict[str, float]:
        compressed = {} if self.compression is None else self.compression.metrics()
        return super().extra_metrics() | compressed

    def settling_steps(self) -> int:
        return 0 if self.compression is None else self.compression.dense_steps_left()

    def totals(self) -> dict[str, Any]:
        return {} if self.compression is None else {"compression": self.compression.ledger.totals()}
