"""compression=powersgd: matrices travel as products of two thin ones (Vogels et al. 2019), by torch's own hook."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from src.compression.base import Answer, Bucket, Compression, Plain, Ranks, named
from src.compression.ledger import all_reduce_bytes
from src.compression.needs import Needs, Shapes, elements
from src.footprint import FP32_BYTES

FIRST_START = 2  # torch's own limit, where anything is kept from step to step


class PowerSGD(Compression):
    """matrix_rank: of the approximation. warmup_steps: dense ones at the beginning, at least 2.

    error_feedback: what the product misses is added to the next step's gradient. min_compression_rate: matrices that
    would shrink by less are sent as they are, as vectors are. Q is kept from step to step (warm start).
    """

    keeps = "what the products miss"
    holds = "residuals, P and Q, copies of a bucket"

    def __init__(
        self,
        matrix_rank: int = 1,
        warmup_steps: int = 10,
        error_feedback: bool = True,
        min_compression_rate: float = 2,
    ) -> None:
        self.refuse_problems(
            matrix_rank=matrix_rank, warmup_steps=warmup_steps, min_compression_rate=min_compression_rate
        )
        self.matrix_rank, self.warmup_steps = matrix_rank, warmup_steps
        self.error_feedback, self.min_compression_rate = error_feedback, min_compression_rate

    @classmethod
    def problems(cls, arguments: Mapping[str, Any]) -> list[str]:
        found = []
        if (matrix_rank := arguments.get("matrix_rank", 1)) < 1:
            found.append(f"compression.matrix_rank={matrix_rank} approximates nothing. Choose 1 or more.")
        if (warmup := arguments.get("warmup_steps", FIRST_START)) < FIRST_START:
            found.append(
                f"compression.warmup_steps={warmup}: torch's PowerSGD keeps errors and Q from step to step, and begins"
                f" after {FIRST_START} dense steps at the earliest. Use compression.warmup_steps={FIRST_START} or more."
            )
        if (rate := arguments.get("min_compression_rate", 2)) <= 0:
            found.append(f"compression.min_compression_rate={rate} is no factor. Choose more than 0.")
        return found

    def begin(self, ranks: Ranks, names: Mapping[Tensor, str]) -> None:
        super().begin(ranks, names)
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        self.hook_state = PowerSGDState(
            ranks.group,
            self.matrix_rank,
            FIRST_START,
            self.min_compression_rate,
            self.error_feedback,
            warm_start=True,
        )
        self.factors: dict[str, dict[str, Tensor]] = {"p": {}, "q": {}}  # P and Q by the bucket's first parameter

    def needs(self, shapes: Shapes, ranks: int) -> Needs:
        numel = elements(shapes)
        products = sum(sum(self.thin(shape)) for shape in shapes)
        whole = sum(elements([shape]) for shape in shapes if not any(self.thin(shape)))
        residual = FP32_BYTES * numel if self.error_feedback else 0
        return Needs(
            kept=residual + FP32_BYTES * products,
            work=2 * residual + FP32_BYTES * whole,  # a copy of the bucket, and what the products miss of it
            sent=FP32_BYTES * (products + whole),
        )

    def thin(self, shape: Sequence[int]) -> tuple[int, int]:
        """Elements of P and Q of a gradient; none of one that is sent whole."""
        size, rows = elements([shape]), shape[0] if shape else 1
        columns = size // rows
        thickness = min(rows, columns, self.matrix_rank)
        is_sent_whole = (rows + columns) * thickness * self.min_compression_rate >= size
        return (0, 0) if is_sent_whole else (rows * thickness, columns * thickness)

    def sent_formula(self, ranks: int) -> str:
        return f"4 bytes x (rows + columns) x {self.matrix_rank} of each matrix, and of all that would not shrink"

    def announcement(self) -> str:
        return f"compression: matrices of gradients travel as products of rank {self.matrix_rank}"

    def compress(self, bucket: Bucket) -> Answer:
        if self.ledger.steps < self.warmup_steps:
            return self.dense(bucket)
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        state, size = self.hook_state, self.ranks.size
        state.iter = FIRST_START  # the steps are counted here, where a resume knows them
        # In shares of the mean, not of the sum: the number of ranks may be another after a resume.
        buffer = bucket.buffer().div_(size)
        self.lend(bucket)
        before = state.total_numel_after_compression
        if buffer.device.type == "cpu":
            with no_gpu_to_wait_for():
                answer = powerSGD_hook(state, InOrderOfMemory(bucket))  # type: ignore[arg-type]
                # The hook's later all-reduces begin in gloo's threads. Those of two buckets would meet in another order
                # on each rank, or wait for one another's threads.
                answer.wait()
        else:
            answer = powerSGD_hook(state, InOrderOfMemory(bucket))  # type: ignore[arg-type]
        sent = (state.total_numel_after_compression - before) * buffer.itemsize
        self.ledger.add(all_reduce_bytes(sent, size), self.dense_bytes(buffer))

        def settle(done: Answer) -> Tensor:
            self.take_back(bucket)
            return done.value().mul_(size)

        return answer.then(settle)

    def lend(self, bucket: Bucket) -> None:
        """Give the hook what is kept of this bucket, under the bucket's number."""
        state, index, parameters = self.hook_state, bucket.index(), bucket.parameters()
        if self.error_feedback:
            state.error_dict[index] = self.residuals.of(index, bucket.buffer(), parameters)
        name = self.residuals.names[parameters[0]]
        state.p_memory_dict.pop(index, None)
        state.q_memory_dict.pop(index, None)
        p, q = self.factors["p"].get(name), self.factors["q"].get(name)
        rows, columns = (sum(sizes) for sizes in zip(*[self.thin(each.shape) for each in parameters], strict=True))
        # Of a run with other arguments they would not fit. The hook draws Q anew where there is no P, and asks no more.
        if p is not None and q is not None and (p.numel(), q.numel()) == (rows, columns):
            state.p_memory_dict[index], state.q_memory_dict[index] = p, q

    def take_back(self, bucket: Bucket) -> None:
        """Keep what the hook has made of it."""
        state, index, parameters = self.hook_state, bucket.index(), bucket.parameters()
        if self.error_feedback:
            self.residuals.replace(index, state.error_dict[index])
        name = self.residuals.names[parameters[0]]
        self.factors["p"][name], self.factors["q"][name] = state.p_memory_dict[index], state.q_memory_dict[index]

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {
            f"{kind}.{name}": factor
            for kind, factors in self.factors.items()
            for name, factor in factors.items()
            if factor.numel()
        }

    def go_on_from(self, parts: Sequence[Mapping[str, Tensor]], same_ranks: bool, plain: Plain | None) -> None:
        super().go_on_from(parts, same_ranks, plain)
        for kind in self.factors:
            self.factors[kind] = {n: t.clone() for n, t in named(parts[0], kind).items()} if same_ranks else {}

    def remember(self) -> None:
        super().remember()
        self.draws = self.hook_state.rng.get_state()  # of the first Q of a bucket

    def discard(self) -> None:
        super().discard()
        self.hook_state.rng.set_state(self.draws)


@contextmanager
def no_gpu_to_wait_for() -> Iterator[None]:
    """torch 2.14's hook waits for a GPU wherever there is one, also for gradients on the CPU, of which that raises."""
    wait = torch.cuda.synchronize
    torch.cuda.synchronize = lambda device=None: None
    try:
        yield
    finally:
        torch.cuda.synchronize = wait


class InOrderOfMemory:
    """A bucket whose gradients are contiguous views, in the order in which their elements lie there.

    The hook flattens them, which a view in another order (channels last) does not allow; it knows no scalars either.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.index, self.is_last = bucket.index, bucket.is_last
        self.buffer, self.parameters = bucket.buffer, bucket.parameters

    def gradients(self) -> list[Tensor]:
        parameters = self.parameters()
        parts = torch.split(self.buffer(), [parameter.numel() for parameter in parameters])
        return [part.view(p.shape or (1,)) for part, p in zip(parts, parameters, strict=True)]
