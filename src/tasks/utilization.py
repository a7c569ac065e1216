"""Model FLOPs utilisation of a run: of models that count their operations, on devices whose peak is known."""

import logging

import torch

from src.bench.peaks import peak_tflops
from src.flops import Utilization
from src.run import Experiment

log = logging.getLogger(__name__)


def utilization(experiment: Experiment) -> Utilization | None:
    """What logged steps work `mfu` out with; says by which formula. None: no peak is known here, or no count."""
    world, precision, flops = experiment.world, experiment.spec.precision.name, experiment.flops
    if flops is None or world.device.type != "cuda":
        return None
    device_name = torch.cuda.get_device_name(world.device)
    tflops = peak_tflops(device_name, precision)
    if tflops is None:
        log.info("no mfu: the peak of %s in %s is not known here (src/bench/peaks.py)", device_name, precision)
        return None
    log.info(
        "mfu = tokens/s x (%s) / (%d rank(s) x %g TFLOP/s, dense %s of %s); padding and masked tokens count as tokens",
        flops.formula(), world.world_size, tflops, precision, device_name,
    )  # fmt: skip
    return Utilization(flops, tflops * 1e12 * world.world_size)
