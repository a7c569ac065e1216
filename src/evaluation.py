"""The whole test set, each sample counted once, whatever the split."""

import math
from collections.abc import Callable
from typing import Literal

import torch

from src.batch import BatchPlan, BatchSizes
from src.data.base import Source
from src.strategies.base import Strategy

Metric = Literal["accuracy", "perplexity"]


def metric_of(kind: str) -> Metric:
    """What an evaluation gives beside the loss. kind: of the data."""
    return "perplexity" if kind == "tokens" else "accuracy"


def evaluate(
    strategy: Strategy, test: Source, sizes: BatchSizes, device: torch.device, metric: Metric, beat: Callable[[], None]
) -> dict[str, float]:
    """{"loss", metric, "samples"} of `test`, over all ranks.

    sizes: of training; its micro-batches are used, one at a time. beat: called after each. Collective; waits for the
    device; leaves the strategy in evaluation mode.
    """
    strategy.train_mode(False)
    sizes = BatchSizes(sizes.micro_batch_size, 1, sizes.data_parallel_size)
    plan = BatchPlan(test.num_samples, sizes.global_batch_size, seed=0, shuffle=False)
    requests = [request for batch in plan.epoch(0) for request in batch.requests(sizes, strategy.data.rank)]
    total = torch.zeros(4, dtype=torch.float64, device=device)
    for request, batch in zip(requests, test.stream(requests, epoch=0), strict=True):
        sums = strategy.evaluate(batch)
        if sums is not None:
            total[:3] += sums.stacked()
            total[3] += request.num_real
        beat()
    loss, correct, targets, samples = strategy.sum(total).tolist()
    mean = loss / max(targets, 1.0)
    # exp(709) is the largest float
    score = math.exp(min(mean, 700.0)) if metric == "perplexity" else correct / max(targets, 1.0)
    return {"loss": mean, metric: score, "samples": int(samples)}
