"""The loop. It knows batches, steps and epochs, and no strategy."""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from src.batch import IGNORED, BatchPlan, BatchSizes, GlobalBatch, MicroBatch
from src.data.base import Source
from src.memory import peak_memory_bytes, synchronize
from src.schedule import Schedule
from src.strategies.base import Strategy
from src.tracking.reporter import SilentReporter

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """When to stop, log and evaluate, all in optimizer steps but epochs. eval_every None: after each epoch."""

    epochs: int
    max_steps: int | None = None
    log_every: int = 10
    eval_every: int | None = None


class Window:
    """What was measured since the last logged step."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.started = time.perf_counter()
        self.steps = 0
        self.samples = 0
        self.data_wait_seconds = 0.0


class Trainer:
    """Runs `strategy` over `train`, evaluating on `test`.

    sizes: the batch arithmetic; its data_parallel_size is the strategy's. metric: "accuracy" or "perplexity".
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
        device: torch.device,
        reporter: SilentReporter,
        metric: str = "accuracy",
    ) -> None:
        self.strategy, self.train, self.test = strategy, train, test
        self.sizes, self.limits, self.schedule = sizes, limits, schedule
        self.device, self.reporter, self.metric = device, reporter, metric
        self.plan = BatchPlan(train.num_samples, sizes.global_batch_size, seed)
        steps = self.plan.steps_per_epoch * limits.epochs
        self.total_steps = steps if limits.max_steps is None else min(steps, limits.max_steps)
        self.step = 0
        self.samples = 0  # position in the data, over all ranks
        self.skipped_steps = 0
        self.training_seconds = 0.0
        self.window = Window()

    def fit(self) -> None:
        """Train to the end, with a last evaluation."""
        self.reporter.begin(self.total_steps)
        self.strategy.train_mode(True)
        evaluated_at: int | None = None
        for epoch in range(self.limits.epochs):
            loss_sum = torch.zeros((), device=self.device)
            targets: int | Tensor = 0
            for batch, microbatches in self.batches(epoch):
                step_loss, valid = self.train_step(batch, microbatches)
                if step_loss is not None:
                    loss_sum += step_loss
                targets = targets + valid
                if self.limits.eval_every is not None and self.step % self.limits.eval_every == 0:
                    self.evaluate()
                    evaluated_at = self.step
                if self.step == self.total_steps:
                    break
            self.end_epoch(epoch, loss_sum, targets)
            if self.step != evaluated_at and (self.limits.eval_every is None or self.step == self.total_steps):
                self.evaluate()
                evaluated_at = self.step
            if self.step == self.total_steps:
                break
        self.reporter.update(samples_per_second=self.samples / max(self.training_seconds, 1e-9))

    def batches(self, epoch: int) -> Iterator[tuple[GlobalBatch, list[MicroBatch]]]:
        """Each step's global batch with this data rank's micro-batches of it, fetched."""
        batches = list(self.plan.epoch(epoch))[: self.total_steps - self.step]
        requests = [batch.requests(self.sizes, self.strategy.data.rank) for batch in batches]
        stream = self.train.stream([request for step in requests for request in step], epoch)
        for batch, step in zip(batches, requests, strict=True):
            before = time.perf_counter()
            microbatches = [next(stream) for _ in step]
            self.window.data_wait_seconds += time.perf_counter() - before
            yield batch, microbatches

    def train_step(self, batch: GlobalBatch, microbatches: list[MicroBatch]) -> tuple[Tensor | None, int | Tensor]:
        """One optimizer step. Returns this rank's summed loss, and the number of targets in the whole step."""
        self.step += 1
        # Only a logged step waits for the device.
        logged = self.step % self.limits.log_every == 0 or self.step in (1, self.total_steps)
        valid = self.valid_targets(batch, microbatches)
        loss_sum = self.strategy.forward_backward(microbatches, valid)
        factor = self.schedule.factor(self.step - 1 - self.skipped_steps, self.total_steps)
        report = self.strategy.optimizer_step(factor, want_grad_norm=logged)
        self.skipped_steps += report.skipped
        self.samples += len(batch.sample_ids)
        self.window.steps += 1
        self.window.samples += len(batch.sample_ids)
        if logged:
            self.log_step(batch, loss_sum, report.grad_norm, valid)
        return loss_sum, valid

    def valid_targets(self, batch: GlobalBatch, microbatches: list[MicroBatch]) -> int | Tensor:
        """Targets that count in this step, over all micro-batches and data ranks; at least 1.

        Known without asking anybody where every sample has the same number; else one small all-reduce.
        """
        if self.train.targets_per_sample is not None:
            return len(batch.sample_ids) * self.train.targets_per_sample
        local = sum((micro.targets != IGNORED).sum() for micro in microbatches)
        assert isinstance(local, Tensor)
        # A step without any target has zero loss and zero gradient, and divides by one.
        return self.strategy.data.sum(local).clamp(min=1)

    def log_step(self, batch: GlobalBatch, loss_sum: Tensor | None, norm: Tensor | None, valid: int | Tensor) -> None:
        """Reduce, report and start a new window. Collective: every rank calls it; it waits for the device."""
        loss = self.reduce(loss_sum) / float(valid)
        seconds = time.perf_counter() - self.window.started
        self.training_seconds += seconds
        window = self.window
        record = {
            "step": self.step,
            "epoch": batch.epoch,
            "samples": self.samples,
            "batch_hash": batch.hash,
            "loss": loss,
            "lr": self.strategy.learning_rates()[0],
            "grad_norm": float(norm) if norm is not None else None,
            "step_seconds": seconds / window.steps,
            "samples_per_second": window.samples / seconds,
            "data_wait_seconds": window.data_wait_seconds / window.steps,
            "peak_memory_bytes": peak_memory_bytes(self.device),
            "skipped_steps": self.skipped_steps,
            **self.strategy.extra_metrics(),
        }
        per_sample = self.train.targets_per_sample
        if self.metric == "perplexity" and per_sample is not None:
            record["tokens_per_second"] = window.samples / seconds * per_sample
        if loss == 0.0 and per_sample is None:
            log.warning("step %d: loss 0; every target of the step may be masked (-100)", self.step)
        self.reporter.train(record)
        self.reporter.update(samples_per_second=self.samples / self.training_seconds)
        window.restart()

    def reduce(self, loss_sum: Tensor | None) -> float:
        """The sum over all ranks that hold a part of the loss, in nats.

        loss_sum: this rank's part, scalar, detached; None on a rank that does not hold the loss.
        """
        part = torch.zeros((), device=self.device) if loss_sum is None else loss_sum.clone()
        return float(self.strategy.sum(part))

    def end_epoch(self, epoch: int, loss_sum: Tensor, targets: int | Tensor) -> None:
        """Report the one mean loss of the epoch, weighted by targets, over all ranks."""
        mean = self.reduce(loss_sum) / float(targets)
        samples = self.samples - epoch * self.plan.num_samples
        self.reporter.epoch_ended({"epoch": epoch, "step": self.step, "loss": mean, "samples": samples})

    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy or perplexity on the whole test set, each sample counted once, whatever the split."""
        if self.window.steps:  # since the last logged step; what is queued on the device belongs to the training
            synchronize(self.device)
            self.training_seconds += time.perf_counter() - self.window.started
        self.strategy.train_mode(False)
        sizes = BatchSizes(self.sizes.micro_batch_size, 1, self.sizes.data_parallel_size)
        plan = BatchPlan(self.test.num_samples, sizes.global_batch_size, seed=0, shuffle=False)
        requests = [request for batch in plan.epoch(0) for request in batch.requests(sizes, self.strategy.data.rank)]
        total = torch.zeros(4, dtype=torch.float64, device=self.device)
        for request, batch in zip(requests, self.test.stream(requests, epoch=0), strict=True):
            sums = self.strategy.evaluate(batch)
            if sums is not None:
                total[:3] += sums.stacked()
                total[3] += request.num_real
        loss, correct, targets, samples = self.strategy.sum(total).tolist()
        record: dict[str, float] = {"step": self.step, "loss": loss / max(targets, 1.0)}
        if self.metric == "perplexity":
            record["perplexity"] = math.exp(min(record["loss"], 700.0))  # exp(709) is the largest float
        else:
            record["accuracy"] = correct / max(targets, 1.0)
        record["samples"] = int(samples)
        self.reporter.evaluated(record)
        self.strategy.train_mode(True)
        self.window.restart()
        return record
