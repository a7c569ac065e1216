"""The loop. It knows batches, steps and epochs, and no strategy."""

import logging
import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from src.batch import IGNORED, BatchPlan, BatchSizes, GlobalBatch, MicroBatch
from src.control import Control
from src.data.base import Source
from src.evaluation import Metric, evaluate
from src.finite import LossWatch, NonFiniteLoss
from src.flops import Utilization
from src.limits import Limits
from src.memory import peak_memory_bytes
from src.meter import StepPeak
from src.objective import at_least_one
from src.pace import Pace
from src.position import Position
from src.profiling.watch import OverlapWatch
from src.schedule import Schedule
from src.snapshots import Snapshots
from src.strategies.base import StepReport, Strategy
from src.tracking.reporter import SilentReporter
from src.world import World

log = logging.getLogger(__name__)


class Trainer:
    """Runs `strategy` over `train`, evaluating on `test`.

    sizes: the batch arithmetic; its data_parallel_size is the strategy's. position: where the run has come to.
    """

    def __init__(
        self,
        strategy: Strategy,
        train: Source,
        test: Source,
        sizes: BatchSizes,
        limits: Limits,
        schedule: Schedule,
        seed: int,
        world: World,
        reporter: SilentReporter,
        snapshots: Snapshots,
        control: Control,
        metric: Metric = "accuracy",
        position: Position | None = None,
        utilization: Utilization | None = None,
    ) -> None:
        self.strategy, self.train, self.test = strategy, train, test
        self.sizes, self.limits, self.schedule = sizes, limits, schedule
        self.device, self.reporter, self.metric = world.device, reporter, metric
        self.snapshots, self.control = snapshots, control
        self.plan = BatchPlan(train.num_samples, sizes.global_batch_size, seed)
        self.position = Position() if position is None else position
        self.total_steps = limits.last_step(self.position, self.plan)
        self.epoch_loss = torch.zeros((), device=self.device)  # since position.loss_sum was last brought up to date
        self.epoch_targets: int | Tensor = 0
        self.losses = LossWatch(world)
        self.peak = StepPeak(strategy, world.device, beside=(train, test), after=strategy.settling_steps())
        self.pace = Pace(self.device, metric == "perplexity", utilization)
        self.overlap = OverlapWatch(strategy, world, limits.profile_every, reporter, control, self.pace)
        self.evaluation: dict[str, float] | None = None  # of the weights as they are

    def fit(self) -> None:
        """Train to the end, with a last evaluation. Raises Interrupted, after saving, where the ranks agree to stop."""
        self.reporter.begin(self.total_steps)
        self.strategy.train_mode(True)
        if self.position.step == self.total_steps:
            log.info("step %d has been reached before; nothing is left to train", self.total_steps)
        with self.control.deferred():
            while self.position.step < self.total_steps:
                self.train_epoch(*self.position.in_epoch(self.plan.num_samples))
        if self.evaluation is None:  # resumed at its end
            self.evaluate()
        self.control.rest()  # gathering and writing the weights, and closing a tracker, are no steps
        self.reporter.update(samples_per_second=self.pace.samples_per_second)

    def train_epoch(self, epoch: int, samples_done: int) -> None:
        """The rest of an epoch, or of the run."""
        for batch, microbatches in self.batches(epoch, samples_done):
            self.control.begin_step()
            with self.peak.step():
                self.train_step(batch, microbatches)
            if self.overlap.is_due(self.position.step):
                self.overlap.measure(self.position.step, microbatches, self.valid_targets(batch, microbatches))
            is_last = self.position.step == self.total_steps
            ends_epoch = self.position.samples == (epoch + 1) * self.plan.num_samples
            every = self.limits.eval_every
            if ends_epoch or is_last:
                self.end_epoch(epoch)
            if is_last or (ends_epoch if every is None else self.position.step % every == 0):
                self.evaluate()
            signal_number = self.control.end_step(is_last)
            # While steps are skipped the weights may be to blame, and a save would push out the last good ones.
            is_due = self.snapshots.is_due(self.position.step, is_last) and not self.losses.skipped_in_a_row
            if signal_number is not None or is_due:
                self.save(in_background=signal_number is None)
            if signal_number is not None:
                self.snapshots.finish()
                raise self.control.stop.ending(signal_number)

    def batches(self, epoch: int, samples_done: int) -> Iterator[tuple[GlobalBatch, list[MicroBatch]]]:
        """Each step's global batch with this data rank's micro-batches of it, fetched."""
        batches = list(self.plan.epoch(epoch, samples_done))[: self.total_steps - self.position.step]
        requests = [batch.requests(self.sizes, self.strategy.data.rank) for batch in batches]
        stream = self.train.stream([request for step in requests for request in step], epoch)
        for batch, step in zip(batches, requests, strict=True):
            before = time.perf_counter()
            microbatches = [next(stream) for _ in step]
            self.pace.data_wait_seconds += time.perf_counter() - before
            yield batch, microbatches

    def train_step(self, batch: GlobalBatch, microbatches: list[MicroBatch]) -> None:
        """One optimizer step."""
        position = self.position
        position.step += 1
        self.evaluation = None
        # Only a logged step waits for the device.
        logged = position.step % self.limits.log_every == 0 or position.step in (1, self.total_steps)
        targets = self.targets(batch, microbatches)
        if self.limits.on_nonfinite == "skip":
            self.strategy.remember()
        loss_sum = self.strategy.forward_backward(microbatches, at_least_one(targets))
        if self.limits.on_nonfinite == "skip" and not math.isfinite(self.reduce(loss_sum)):
            self.strategy.discard()
            self.losses.skip(position.step, self.snapshots.last_words)
            report = StepReport(None, skipped=True)
        else:
            factor = self.schedule.factor(position.step - 1 - position.skipped_steps, self.total_steps)
            report = self.strategy.optimizer_step(factor, want_grad_norm=logged)
            if not report.skipped:  # by fp16's scaler, for what may have made the loss infinite as well
                self.count_loss(loss_sum, targets)
            self.losses.skipped_in_a_row = 0
        position.skipped_steps += report.skipped
        position.samples += len(batch.sample_ids)
        self.pace.count(len(batch.sample_ids), targets, microbatches[0].targets.shape[-1])
        if logged:
            self.log_step(batch, loss_sum, report.grad_norm, targets)

    def count_loss(self, loss_sum: Tensor | None, targets: int | Tensor) -> None:
        """Add a step's loss to the epoch's. Its arguments are those of `log_step`."""
        if loss_sum is not None:
            self.epoch_loss += loss_sum
        self.epoch_targets = self.epoch_targets + targets
        self.losses.add(self.position.step, loss_sum)

    def valid_targets(self, batch: GlobalBatch, microbatches: list[MicroBatch]) -> int | Tensor:
        """What a step's loss is divided by: without any target it has zero loss and gradient, and divides by one."""
        return at_least_one(self.targets(batch, microbatches))

    def targets(self, batch: GlobalBatch, microbatches: list[MicroBatch]) -> int | Tensor:
        """Targets that count in this step, over all micro-batches and data ranks.

        Known without asking anybody where every sample has the same number; else one small all-reduce.
        """
        if self.train.targets_per_sample is not None:
            return len(batch.sample_ids) * self.train.targets_per_sample
        local = sum((micro.targets != IGNORED).sum() for micro in microbatches)
        assert isinstance(local, Tensor)
        return self.strategy.data.sum(local)

    def log_step(self, batch: GlobalBatch, loss_sum: Tensor | None, norm: Tensor | None, targets: int | Tensor) -> None:
        """Reduce, report and start a new window. Collective: every rank calls it; it waits for the device."""
        self.settle_epoch_loss()
        loss = self.reduce(loss_sum) / max(float(targets), 1.0)
        seconds = self.pace.close_window()
        window, position = self.pace, self.position
        record = {
            "step": position.step,
            "epoch": batch.epoch,
            "samples": position.samples,
            "batch_hash": batch.hash,
            "loss": loss,
            "lr": self.strategy.learning_rates()[0],
            "grad_norm": float(norm) if norm is not None else None,
            **window.rates(seconds),
            "peak_memory_bytes": peak_memory_bytes(self.device),
            "skipped_steps": position.skipped_steps,
            **self.strategy.extra_metrics(),
        }
        if not float(targets):
            log.warning("step %d: all its targets are masked (-100); its loss and gradients are zero", position.step)
        self.reporter.train(record)
        self.reporter.update(samples_per_second=window.samples_per_second, **self.strategy.totals())
        window.restart()

    def reduce(self, loss_sum: Tensor | None) -> float:
        """The sum over all ranks that hold a part of the loss, in nats.

        loss_sum: this rank's part, scalar, detached; None on a rank that does not hold the loss.
        """
        part = torch.zeros((), device=self.device) if loss_sum is None else loss_sum.clone()
        return float(self.strategy.sum(part))

    def settle_epoch_loss(self) -> None:
        """Bring the position's loss and targets of this epoch up to date, the same on every rank. Collective.

        The sum has met every loss since the last time, so it shows whether one was not finite: NonFiniteLoss.
        """
        loss_sum = self.reduce(self.epoch_loss)
        bad = self.losses.first_bad(math.isfinite(loss_sum))
        if not math.isfinite(loss_sum):
            where = f"step {bad[0]}, rank {bad[1]}" if bad else f"step {self.position.step}"
            raise NonFiniteLoss(
                f"{where}: the loss is not finite. {self.snapshots.last_words()} Lower optimizer.lr, set"
                " trainer.max_grad_norm, or skip such steps with trainer.on_nonfinite=skip."
            )
        self.position.loss_sum += loss_sum
        self.position.targets += int(self.epoch_targets)
        self.epoch_loss.zero_()
        self.epoch_targets = 0

    def end_epoch(self, epoch: int) -> None:
        """Report the one mean loss of the epoch, weighted by targets, over all ranks."""
        self.settle_epoch_loss()
        position = self.position
        mean = position.loss_sum / max(position.targets, 1)
        samples = position.samples - epoch * self.plan.num_samples
        self.reporter.epoch_ended({"epoch": epoch, "step": position.step, "loss": mean, "samples": samples})
        position.loss_sum, position.targets = 0.0, 0

    def evaluate(self) -> None:
        """Loss and accuracy or perplexity on the whole test set, reported."""
        self.pace.pause()
        self.evaluation = evaluate(self.strategy, self.test, self.sizes, self.device, self.metric, self.control.beat)
        self.reporter.evaluated({"step": self.position.step, **self.evaluation})
        self.strategy.train_mode(True)
        self.pace.restart()

    def save(self, in_background: bool) -> None:
        """A checkpoint of this step, of nothing that is not finite. Collective."""
        self.pace.pause()
        self.settle_epoch_loss()
        if self.snapshots.monitor is not None and self.evaluation is None:
            self.evaluate()
        self.control.rest()  # after the evaluation, whose beats would start the watch again
        path = self.snapshots.save(self.position, self.evaluation, in_background)
        self.reporter.update(checkpoint=str(path), steps=self.position.step, samples=self.position.samples)
        self.pace.restart()
