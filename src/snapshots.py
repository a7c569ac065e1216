"""Saving what a run needs to go on, and taking it back: the strategy's state, the position, the random numbers."""

import logging
import math
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from src.checkpoint.whole import FOLDER, newest_whole, step_name
from src.finite import REMEDY, NonFiniteLoss
from src.inheritance import PREFIX, Heir, own_tensors
from src.position import Position
from src.random_state import random_states, restore_random_states, seed_all
from src.strategies.base import Strategy
from src.strategies.run_state import State
from src.world import World

if TYPE_CHECKING:
    from src.checkpoint.store import Store

log = logging.getLogger(__name__)

ABANDON_SECONDS = 10.0
SAVING_TIMEOUT = timedelta(minutes=30)  # how long a rank waits for the slowest rank's files

Monitor = Literal["loss", "accuracy", "perplexity"]
MONITORS = get_args(Monitor)


@dataclass(frozen=True)
class SavePlan:
    """every: optimizer steps between saves, and one at the end; None: only where a signal stops the run.

    keep: of the newest. monitor: the evaluation's value whose best checkpoint is kept too; every save then evaluates.
    asynchronous: training goes on while a copy is written.
    """

    every: int | None = None
    keep: int = 3
    monitor: Monitor | None = None
    asynchronous: bool = False


class Snapshots:
    """The checkpoints of one run, in <run folder>/checkpoints. Collective: every rank calls each method alike.

    run_id: whose checkpoints the store may prune. seed: of the run, for random numbers that no checkpoint can give.
    """

    def __init__(self, strategy: Strategy, world: World, run_dir: Path, run_id: str, plan: SavePlan, seed: int) -> None:
        self.strategy, self.world, self.plan, self.seed = strategy, world, plan, seed
        self.folder, self.run_id = run_dir / FOLDER, run_id
        self.saved_step: int | None = None  # of the newest checkpoint
        self.began_from: Path | None = None
        self.best: dict[str, Any] | None = None  # {"step", "monitor", "value"} of the best of this folder
        self.store: Store | None = None
        self.group: dist.ProcessGroup | None = None
        if world.has_peers:
            # Now: a run whose launcher was killed is asked to stop and save when nobody keeps a store to meet at.
            group = dist.new_group(backend="gloo", timeout=SAVING_TIMEOUT)
            assert isinstance(group, dist.ProcessGroup), "every rank is a member"
            self.group = group

    @property
    def monitor(self) -> Monitor | None:
        return self.plan.monitor

    def is_due(self, step: int, is_last: bool) -> bool:
        every = self.plan.every
        return every is not None and (step % every == 0 or is_last) and step != self.saved_step

    def save(self, position: Position, evaluation: dict[str, float] | None, in_background: bool) -> Path:
        """A checkpoint of `position`; where. Raises CheckpointFailed, on every rank; what was there before still is."""
        path = self.folder / step_name(position.step)
        if position.step == self.saved_step:
            return path
        state = self.strategy.state()
        tensors = {**state.tensors, **own_tensors(state, self.strategy.data.rank)}
        if not all_finite(tensors, self.world):
            # The loss of this step was finite; what it did to the weights was not.
            raise NonFiniteLoss(
                f"step {position.step}: weights or optimizer states are not finite, and are not saved."
                f" {self.last_words()} {REMEDY}"
            )
        is_best = self.note_best(position.step, evaluation)
        plain = {
            "position": position.plain(),
            "strategy": state.plain,
            "data_parallel_size": self.strategy.data.size,
            "random": sorted(random_states(self.world.device)),
            "best": self.best,
        }
        self.open_store().save(
            position.step,
            {**tensors, **self.random_tensors()},
            plain,
            best=is_best,
            asynchronous=self.plan.asynchronous and in_background,
        )
        self.saved_step = position.step
        log.info("step %d  saved %s", position.step, path)
        return path

    def note_best(self, step: int, evaluation: dict[str, float] | None) -> bool:
        """Whether this is the best so far by the monitored value, which is the same on every rank."""
        if self.monitor is None or evaluation is None:
            return False
        value = evaluation[self.monitor]
        is_better = math.isfinite(value) and (
            self.best is None
            or (value > self.best["value"] if self.monitor == "accuracy" else value < self.best["value"])
        )
        if is_better:
            self.best = {"step": step, "monitor": self.monitor, "value": value}
        return is_better

    def restore(self, checkpoint: Path) -> Position:
        """Fill the strategy and the generators from `checkpoint`; where it was. Raises CheckpointMismatch, -Damaged."""
        from src.checkpoint.loading import load  # torch.distributed.checkpoint, 1 s
        from src.checkpoint.manifest import read_manifest

        manifest = read_manifest(checkpoint)
        plain = manifest.state
        position = Position(**plain["position"])
        state, random = self.strategy.state(), self.random_tensors()
        # Another number of data ranks has no use for these streams.
        knows_random = plain["data_parallel_size"] == self.strategy.data.size and plain["random"] == sorted(
            name.rsplit(".", 1)[1] for name in random
        )
        heir = Heir(self.strategy.data, plain["data_parallel_size"], manifest.tensors)
        inherited = heir.tensors(state, self.world.device)
        wanted = {**state.tensors, **inherited, **(random if knows_random else {})}
        load(checkpoint, wanted, leave=("random.", PREFIX))
        self.strategy.load_state(State(state.tensors, plain["strategy"], heir.rank_state(inherited)))
        if knows_random:
            states = {name.rsplit(".", 1)[1]: tensor for name, tensor in random.items()}
            restore_random_states(states, self.world.device)
        else:
            seed_all(self.seed, position.samples, self.strategy.data.rank)
        self.saved_step, self.began_from = position.step, checkpoint
        best, is_ours = plain["best"], checkpoint.parent.resolve() == self.folder.resolve()
        # Of another folder it is not here to be kept, and another value is not to be compared with.
        self.best = best if best is not None and is_ours and best["monitor"] == self.monitor else None
        log.info("going on from %s: step %d, %d samples", checkpoint, position.step, position.samples)
        return position

    def restore_weights(self, checkpoint: Path) -> Position:
        """Fill the model alone; where its run was. Raises CheckpointMismatch, -Damaged."""
        from src.checkpoint.loading import load  # torch.distributed.checkpoint, 1 s

        state = self.strategy.state()
        model = {name: tensor for name, tensor in state.tensors.items() if name.startswith("model.")}
        manifest = load(checkpoint, model, leave=("optimizer.", "random.", PREFIX))
        self.strategy.load_state(state)
        return Position(**manifest.state["position"])

    def random_tensors(self) -> dict[str, Tensor]:
        """This rank's generators. The ranks of a data rank (tensor and pipeline axes) have the same states."""
        data_rank = self.strategy.data.rank
        return {f"random.{data_rank}.{key}": state for key, state in random_states(self.world.device).items()}

    def open_store(self) -> "Store":
        if self.store is None:
            from src.checkpoint.store import Store  # torch.distributed.checkpoint, 1 s

            self.store = Store(self.folder, self.run_id, self.plan.keep, group=self.group)
        return self.store

    def last_words(self) -> str:
        """What an error says of what is left to go on from."""
        newest, _ = newest_whole(self.folder, contents=False)
        newest = newest or self.began_from
        return "No checkpoint was saved before." if newest is None else f"The last good checkpoint is {newest}."

    def finish(self) -> None:
        """Wait for a save that is still going on."""
        if self.store is not None:
            self.store.close()
            self.store = None

    def abandon(self) -> None:
        """On the way out of a failed run: give a save that is going on a few seconds, and wait no longer.

        Its peers may be gone; what it has begun then stays hidden.
        """
        if self.store is not None:
            self.store.abandon(ABANDON_SECONDS)


def all_finite(tensors: dict[str, Tensor], world: World) -> bool:
    """Whether no rank's part of any floating-point tensor holds NaN or infinity. Collective."""
    ends = [torch.zeros((), device=world.device, dtype=torch.float64)]
    for tensor in tensors.values():
        part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if part.is_floating_point() and part.numel():
            # The loop waits for this: isfinite of all elements takes ten times as long. NaN comes through both ends.
            ends += [end.to(ends[0]) for end in torch.aminmax(part.detach())]
    bad = (~torch.isfinite(torch.stack(ends))).any().float()
    if world.world_size > 1:
        dist.all_reduce(bad)
    return float(bad) == 0.0


def starting_point(run_dir: Path, info: dict[str, Any], world: World) -> Path | None:
    """The checkpoint to go on from: what the launcher chose or, of ranks that were started again, the newest whole one.

    Collective: rank 0 looks and tells the others.
    """
    found = [info.get("resume")]
    if info.get("restarts"):
        if world.is_main:
            newest, damaged = newest_whole(run_dir / FOLDER)
            for line in damaged:
                log.warning("passed over: %s", line)
            found = [info.get("resume") if newest is None else str(newest)]
        if world.has_peers:
            dist.broadcast_object_list(found, src=0)
    return None if found[0] is None else Path(found[0])
