"""What a compressor is: it answers a bucket of one rank's gradients with the future of their mean over the ranks."""

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from src.compression.ledger import Ledger, all_reduce_bytes
from src.compression.needs import Needs, Shapes
from src.compression.residuals import Residuals
from src.errors import Refused

log = logging.getLogger(__name__)

Answer = torch.futures.Future[Tensor]
Plain = Mapping[str, Any]  # JSON's types


class Bucket(Protocol):
    """torch's GradBucket, as far as compressors read it. buffer: flat, of all gradients of the bucket."""

    def index(self) -> int: ...
    def is_last(self) -> bool: ...
    def buffer(self) -> Tensor: ...
    def parameters(self) -> list[Tensor]: ...


@dataclass(frozen=True)
class Ranks:
    """Those that exchange. group: None for the default one."""

    size: int
    group: dist.ProcessGroup | None = None


@dataclass
class Memory:
    """What `Compression.remember` keeps."""

    ledger: Ledger
    tensors: dict[str, Tensor]


class Compression(ABC):
    """Made from plain arguments; `begin` comes before the first bucket. The answer is the same bits on every rank.

    bears_loss_scale: whether gradients may come multiplied by a loss scale that changes, and may overflow.
    keeps: what stays on a rank from step to step, in words; None: nothing does. Then it must see the same buckets at
    every step and after a resume. collective: which one carries most of what is sent. holds: what memory it takes, in
    words. most_values: of a bucket that it can number; None: of any.
    """

    bears_loss_scale: ClassVar[bool] = False
    keeps: ClassVar[str | None] = None
    collective: ClassVar[str] = "all_reduce"
    holds: ClassVar[str]
    most_values: ClassVar[int | None] = None
    warmup_steps: int = 0
    error_feedback: bool = True  # of those that keep errors
    ranks: Ranks = Ranks(1)

    @property
    def keeps_errors(self) -> bool:
        """Whether what is not sent waits for the next step."""
        return self.keeps is not None and self.error_feedback

    @classmethod
    def option(cls) -> str:
        """As a user writes it: its module's name."""
        return cls.__module__.rsplit(".", 1)[-1]

    @classmethod
    def problems(cls, arguments: Mapping[str, Any]) -> list[str]:
        """What is wrong with the arguments: one line each, of choice, reason and remedy."""
        return []

    def refuse_problems(self, **arguments: Any) -> None:
        """For constructors that nobody has checked before."""
        if found := self.problems(arguments):
            raise Refused(*found)

    def begin(self, ranks: Ranks, names: Mapping[Tensor, str]) -> None:
        """names: of the parameters whose gradients will come."""
        self.ranks = ranks
        self.residuals = Residuals(names)
        self.ledger = Ledger()
        self.memory = Memory(Ledger(), {})

    def exchange(self, bucket: Bucket) -> Answer:
        """The mean over the ranks of `bucket`'s gradients, in its own buffer. Collective; buckets come in order."""
        if bucket.index() == 0:
            self.ledger.begin_step()
        answer = self.compress(bucket)
        if bucket.is_last():
            self.ledger.steps += 1
        return answer

    @abstractmethod
    def compress(self, bucket: Bucket) -> Answer:
        """`exchange` of one bucket; it adds what it sends to the ledger, whose `steps` counts those before this."""

    def dense(self, bucket: Bucket) -> Answer:
        """The mean as DDP takes it."""
        buffer = bucket.buffer().div_(self.ranks.size)
        num_bytes = self.dense_bytes(buffer)
        self.ledger.add(num_bytes, num_bytes)
        return all_reduced(buffer, self.ranks)

    def dense_bytes(self, buffer: Tensor) -> int:
        return all_reduce_bytes(buffer.nbytes, self.ranks.size)

    @abstractmethod
    def needs(self, shapes: Shapes, ranks: int) -> Needs:
        """Of a bucket of fp32 gradients, before anything is built."""

    @abstractmethod
    def sent_formula(self, ranks: int) -> str:
        """The arithmetic behind `Needs.sent`, in words, for a plan."""

    def announcement(self) -> str:
        """One line for the log, once ranks are known."""
        return f"gradients are compressed by {type(self).__name__}"

    def metrics(self) -> dict[str, float]:
        """Of the newest step. Collective; it waits for the device."""
        found: dict[str, float] = {"sent_bytes": self.ledger.step_sent, "dense_bytes": self.ledger.step_dense}
        if self.keeps_errors:
            square = self.residuals.squared_norm()
            if square is not None:  # on all ranks or on none
                if self.ranks.size > 1:
                    dist.all_reduce(square, group=self.ranks.group)
                found["residual_norm"] = float(square.sqrt())
        return found

    def tensors(self) -> dict[str, Tensor]:
        """What this rank alone has to go on from, live."""
        return {f"residual.{name}": view for name, view in self.residuals.named().items()}

    def plain(self) -> dict[str, Any]:
        """What all ranks have to go on from, in JSON's types."""
        return {"kind": self.option(), **self.ledger.totals()}

    def go_on_from(self, parts: Sequence[Mapping[str, Tensor]], same_ranks: bool, plain: Plain | None) -> None:
        """Take back what `tensors` gave on the ranks whose heir this one is, and `plain`; None: a run without one.

        same_ranks: each rank is the one heir of the rank with its number, and continues to the bit. Else residuals are
        added up, so that what all ranks together owe stays the same, and the rest begins anew. So it does with what a
        compressor of another kind has kept.
        """
        owed: dict[str, Tensor] = {}
        for tensors in parts:
            for name, tensor in named(tensors, "residual").items():
                owed[name] = owed[name] + tensor if name in owed else tensor
        if owed and not self.keeps_errors:
            log.info(
                "what the run before still owed its weights is left behind: compression=%s keeps none", self.option()
            )
        self.residuals.put_back(owed if self.keeps_errors else {})
        if plain is not None:
            self.ledger.go_on_from(plain)
            if plain["kind"] != self.option():
                self.ledger.steps = 0  # its own warm-up is still to come

    def remember(self) -> None:
        """Before a step that may be discarded. Takes as much memory as `tensors`, from the first call on."""
        kept = {key: clone_into(self.memory.tensors.get(key), tensor) for key, tensor in self.tensors().items()}
        self.memory = Memory(self.ledger.copy(), kept)

    def discard(self) -> None:
        """The step did not count: everything is as `remember` met it, the ledger included."""
        self.ledger = self.memory.ledger.copy()
        self.go_on_from([self.memory.tensors], True, None)

    def dense_steps_left(self) -> int:
        """Of the warm-up."""
        return max(0, self.warmup_steps - self.ledger.steps)

    def past_warm_up(self) -> "Compression":
        """One of the same arguments, not begun, that compresses from its first step on."""
        other = copy.copy(self)
        other.warmup_steps = 0
        return other

    def timed(self) -> "Compression":
        """One that does the same past its warm-up, and keeps what it keeps apart from this one."""
        other = self.past_warm_up()
        other.begin(self.ranks, self.residuals.names)
        return other

    def imagined(self) -> "Compression":
        """What stands for this one, not begun, where gradients have no values (src/plan/trace.py)."""
        return self.past_warm_up()


def clone_into(old: Tensor | None, tensor: Tensor) -> Tensor:
    """A clone of `tensor`, in the place of an older one of its shape: both at once would take twice the memory."""
    return tensor.clone() if old is None or old.shape != tensor.shape else old.copy_(tensor)


def named(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Those whose names begin with "<kind>.", by the rest of their names."""
    return {key.removeprefix(f"{kind}."): tensor for key, tensor in tensors.items() if key.startswith(f"{kind}.")}


def all_reduced(tensor: Tensor, ranks: Ranks) -> Answer:
    """The sum over the ranks, in place."""
    work = dist.all_reduce(tensor, group=ranks.group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]
