"""task=collectives: time and bandwidth of the operations that join ranks, with what they deliver checked."""

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from src.bench.bandwidth_table import as_record, closing_words, table, table_seconds, wall_seconds
from src.bench.collectives import COLLECTIVES, DTYPES
from src.bench.picture import draw
from src.bench.timing import Effort, Measured, equal_parts, measure
from src.control import Control
from src.environment import torchrun_ranks
from src.errors import Refused, did_you_mean
from src.run import Experiment
from src.strategies.base import Setting
from src.task import Task
from src.tasks.parts import peaks
from src.tracking.console import shown
from src.tracking.tables import show
from src.world import World

log = logging.getLogger(__name__)

PICTURE = "bandwidth.html"
SECONDS_BETWEEN_LINES = 10.0  # of the terminal, within one row


class Collectives(Task):
    """operations: of bench.collectives.COLLECTIVES. sizes_mb: in 10^6 bytes. warmup, iterations: calls."""

    reads_data = False

    def __init__(
        self,
        operations: list[str],
        sizes_mb: list[float],
        warmup: int = 5,
        iterations: int = 50,
        dtype: str = "fp32",
    ) -> None:
        self.operations, self.sizes_mb = operations, sizes_mb
        self.effort = Effort(warmup, iterations, dtype)

    @classmethod
    def problems(cls, arguments: Mapping[str, Any], setting: Setting) -> list[str]:
        found = alone_problems(setting.world_size) + count_problems(arguments)
        found += choice_problems("operations", arguments["operations"], COLLECTIVES)
        dtype = arguments.get("dtype", "fp32")
        if dtype not in DTYPES:
            found.append(f"task.dtype={dtype} is unknown. {did_you_mean(str(dtype), DTYPES)}")
        if found:
            return found
        found = size_problems(arguments["sizes_mb"], dtype, setting.world_size)
        if not found and setting.device_type == "cpu":
            ranks = torchrun_ranks()
            num_local = setting.world_size if ranks is None else ranks.local_size
            memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            found += memory_problems(arguments, setting.world_size, num_local, memory_bytes, "this machine has")
        return found

    def __call__(self, experiment: Experiment) -> None:
        world, reporter = experiment.world, experiment.reporter
        self.refuse_what_the_gpu_lacks(world)
        pairs = [(operation, size_mb) for operation in self.operations for size_mb in self.sizes_mb]
        circumstances = {
            "dtype": self.effort.dtype,
            "world_size": world.world_size,
            "backend": backend_of(world),
            "device": world.device.type,
            "warmup": self.effort.warmup,
            "iterations": self.effort.iterations,
        }
        rows = []
        for number, (operation, size_mb) in enumerate(pairs, start=1):
            watch = Watch(f"[{number}/{len(pairs)}] {operation} {size_mb:g} MB", self.effort, world, experiment.control)
            row = measure(operation, round(size_mb * 1e6), world, self.effort, watch.after_each)
            watch.done(row)
            rows.append(row)
            reporter.record("collective", {**circumstances, "size_mb": size_mb, **as_record(row, backend_of(world))})
        experiment.control.rest()
        reporter.update(
            world_size=world.world_size,
            peak_memory_bytes=peaks(world),
            collectives={
                **circumstances,
                "table_seconds": table_seconds(rows),
                "wall_seconds": wall_seconds(rows),
                "rows": [as_record(row, backend_of(world)) for row in rows],
            },
        )
        if world.is_main:
            self.present(rows, experiment)

    def refuse_what_the_gpu_lacks(self, world: World) -> None:
        """Raise Refused where a GPU, which the checks may not wake, has no room for the largest buffers."""
        if world.device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(world.device)
            arguments = {"operations": self.operations, "sizes_mb": self.sizes_mb}
            problems = memory_problems(arguments, world.world_size, 1, free_bytes, f"{world.device} has free")
            if problems:
                raise Refused(*problems)

    def present(self, rows: list[Measured], experiment: Experiment) -> None:
        """The table on stdout, and the picture in the run folder."""
        world, effort = experiment.world, self.effort
        title = (
            f"{world.world_size} ranks, {backend_of(world)} on {world.device.type}, {effort.dtype}; {effort.warmup}"
            f" warm-ups, {effort.iterations} timed calls; contents checked on every rank"
        )
        backend, picture = backend_of(world), experiment.run_dir / PICTURE
        show(title, table(rows, backend), closing_words(rows, backend))
        draw(rows, title, backend, picture)
        show(f"picture: {shown(picture)}")


class Watch:
    """Says that there is progress: to the launcher after each call, to a person now and then."""

    def __init__(self, name: str, effort: Effort, world: World, control: Control) -> None:
        self.name, self.control, self.is_main = name, control, world.is_main
        self.calls, self.total = 0, effort.warmup + effort.iterations + 2  # the checked ones before and after
        self.last_line = time.perf_counter()

    def after_each(self) -> None:
        self.control.beat()
        self.calls += 1
        now = time.perf_counter()
        if self.is_main and now - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = now
            log.info("%s: call %d of %d", self.name, self.calls, self.total)

    def done(self, row: Measured) -> None:
        if self.is_main:
            bus = "" if row.bus_gb_per_second is None else f", bus bandwidth {row.bus_gb_per_second:.3g} GB/s"
            log.info("%s: %.3f ms%s", self.name, row.mean_seconds * 1e3, bus)


def alone_problems(world_size: int) -> list[str]:
    if world_size > 1:
        return []
    return [
        "task=collectives measures what ranks send one another, and there is one rank only."
        " Use launch.nproc=2 or more (with a strategy of many processes), or torchrun."
    ]


def count_problems(arguments: Mapping[str, Any]) -> list[str]:
    found = []
    for key, least in (("warmup", 0), ("iterations", 1)):
        value = arguments.get(key)
        if value is not None and value < least:
            found.append(f"task.{key}={value} is less than {least}; choose {least} or more.")
    return found


def choice_problems(key: str, chosen: list[str], known: Mapping[str, Any]) -> list[str]:
    """Of a list: nothing in it, something unknown, something twice."""
    if not chosen:
        return [f"task.{key} is empty; choose from {', '.join(known)}."]
    found = []
    for choice in dict.fromkeys(chosen):
        if choice not in known:
            found.append(f"task.{key}: {choice} is unknown. {did_you_mean(str(choice), known)}")
        elif chosen.count(choice) > 1:
            found.append(f"task.{key} names {choice} {chosen.count(choice)} times; once is enough.")
    return found


def size_problems(sizes_mb: list[float], dtype: str, world_size: int) -> list[str]:
    """No sizes, or some that leave a rank without an element."""
    if not sizes_mb:
        return ["task.sizes_mb is empty; choose sizes in MB of 10^6 bytes, such as [1,10,100]."]
    least_mb = world_size * DTYPES[dtype].itemsize / 1e6
    return [
        f"task.sizes_mb: {size_mb:g} MB is less than one {dtype} element for each of {world_size} ranks."
        f" Choose {least_mb:g} or more."
        for size_mb in sizes_mb
        if size_mb <= 0 or equal_parts(round(size_mb * 1e6), dtype, world_size) == 0
    ]


def memory_problems(
    arguments: Mapping[str, Any], world_size: int, num_sharing: int, memory_bytes: int, whose: str
) -> list[str]:
    """Sizes whose buffers can't fit. num_sharing: ranks in that memory. whose: completes "and this machine has"."""
    found = []
    for size_mb in arguments["sizes_mb"]:
        num_bytes = round(size_mb * 1e6)
        needs = {name: COLLECTIVES[name].buffer_bytes(num_bytes, world_size) for name in arguments["operations"]}
        name = max(needs, key=lambda name: needs[name])
        if num_sharing * needs[name] > memory_bytes:
            most_mb = memory_bytes * num_bytes / (num_sharing * needs[name]) / 1e6
            found.append(
                f"task.sizes_mb: at {size_mb:g} MB the buffers of {name} take {needs[name] / 1e9:.1f} GB on each of"
                f" {num_sharing} rank(s), and {whose} {memory_bytes / 1e9:.1f} GB. Choose less than {most_mb:.0f}."
            )
    return found


def backend_of(world: World) -> str:
    """The backend that carries this device's tensors: a group may have one a device type."""
    config = dist.get_backend_config()
    return dict(pair.split(":") for pair in config.split(","))[world.device.type]
