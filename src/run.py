"""One rank: build everything from the plain configuration, hand over to the task, close everything.

The configuration stops here; below, every constructor takes plain typed arguments.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from hydra.utils import instantiate
from torch import nn

from src.batch import BatchSizes
from src.checks.setting import batch_sizes, make_setting, num_ranks, strategy_name, task_class
from src.control import Control
from src.data.base import Data
from src.errors import Interrupted
from src.flops import DecoderFlops
from src.heartbeat import Heartbeat
from src.limits import Limits
from src.memory import keep_freed_memory
from src.parallel.recompute import recompute_activations
from src.precision import Precision, cpu_has_native_bf16
from src.schedule import Schedule
from src.sharding import Sharding
from src.snapshots import SavePlan, Snapshots, starting_point
from src.stopping import StopRequest
from src.strategies.base import BuildSpec, OptimizerFactory, Setting, Strategy
from src.tracking.base import NoTracker, RunInfo
from src.tracking.naming import run_name, run_tags
from src.tracking.reporter import Reporter, SilentReporter
from src.world import World

if TYPE_CHECKING:
    from src.checks.alternatives import Alternatives

log = logging.getLogger(__name__)


@dataclass
class Experiment:
    """The parts of a run, built but not yet joined: what a task works with.

    setting: the plain values that all of it was made from. resume: the checkpoint to go on from. alternatives: looks
    for the other ways to train the same; takes seconds. flops: of the model; None: it counts none, or is not built.
    """

    world: World
    run_dir: Path
    seed: int
    setting: Setting
    data: Data
    make_model: Callable[[], nn.Module]
    optimizer: OptimizerFactory
    schedule: Schedule
    strategy: Strategy
    spec: BuildSpec
    sizes: BatchSizes
    limits: Limits
    reporter: SilentReporter
    snapshots: Snapshots
    resume: Path | None
    control: Control
    alternatives: Callable[[], "Alternatives"]
    flops: DecoderFlops | None = None


def run(
    config: dict[str, Any],
    run_dir: Path,
    info: dict[str, Any],
    world: World,
    stop: StopRequest | None = None,
    heart: Heartbeat | None = None,
) -> None:
    """Build the experiment and run its task. Collective over `world`, whose process group must exist.

    Of a task whose ranks are imagined there is no group: `world` is this process's, and the experiment's the imagined.
    info: of the command line and what the launcher decided; see `starting_point`. stop: what stop signals set.
    heart: is told of each step.
    """
    if task_class(config).ranks == "imagined":
        num_imagined = num_ranks(config)
        world = World(0, num_imagined, 0, num_imagined, is_imagined=True)
    apply_numerics(config, world)
    if world.device.type == "cpu":
        keep_freed_memory()
    reporter = make_reporter(config, run_dir, info, world)
    try:
        experiment = build(
            config, run_dir, info, world, reporter, Control(world, config["launch"]["timeout_seconds"], stop, heart)
        )
        announce(config, experiment)
        task = instantiate(config["task"], _convert_="all")
        try:
            task(experiment)
        finally:
            experiment.snapshots.abandon()
            experiment.strategy.close()
    except Interrupted as interrupted:
        reporter.close("interrupted", str(interrupted), interrupted.exit_code)
        raise
    except BaseException as error:
        reporter.close("failed", f"rank {world.world_rank}: {type(error).__name__}: {error}", exit_code=1)
        raise
    reporter.close("finished", None, exit_code=0)


def apply_numerics(config: dict[str, Any], world: World) -> None:
    """Process-wide switches of torch's arithmetic."""
    torch.set_float32_matmul_precision("high" if config["precision"]["name"] == "tf32" else "highest")
    # Convolutions have a switch of their own, which cuDNN has on by default.
    torch.backends.cudnn.allow_tf32 = config["precision"]["name"] == "tf32"
    torch.use_deterministic_algorithms(config["trainer"]["deterministic"])
    if (
        config["precision"]["name"] == "bf16"
        and world.is_main
        and world.device.type == "cpu"
        and not cpu_has_native_bf16()
    ):
        log.warning("precision=bf16 will be slow: this CPU has no bf16 arithmetic and emulates it.")


def make_reporter(config: dict[str, Any], run_dir: Path, info: dict[str, Any], world: World) -> SilentReporter:
    """Rank 0's reporter, with the tracker begun; a silent one elsewhere."""
    if not world.is_main:
        return SilentReporter()
    tracker = instantiate(config["tracking"], _convert_="all") if task_class(config).is_tracked else NoTracker()
    return Reporter(
        run_dir,
        tracker,
        RunInfo(
            run_dir=run_dir,
            name=config["name"] or run_name(info, config, run_dir),
            config={
                **config,
                "world_size": world.world_size,
                "batch": asdict(batch_sizes(config, world.world_size)),
                "overrides": info.get("overrides", []),
            },
            group=config["tracking"].get("group") or info.get("sweep"),
            tags=[*run_tags(info), *config["tracking"].get("tags", [])],
            earlier_id=info.get("wandb_id"),
        ),
    )


def build(
    config: dict[str, Any],
    run_dir: Path,
    info: dict[str, Any],
    world: World,
    reporter: SilentReporter,
    control: Control,
) -> Experiment:
    """Every part of the run from its node."""
    trainer, sizes, seed = config["trainer"], batch_sizes(config, world.world_size), config["seed"]
    make_model = partial(model_of, config)
    strategy: Strategy = instantiate(config["strategy"], _convert_="all")
    return Experiment(
        world=world,
        run_dir=run_dir,
        seed=seed,
        setting=make_setting(config),
        data=instantiate(config["data"], _convert_="all"),
        make_model=make_model,
        optimizer=instantiate(config["optimizer"], _convert_="all"),
        schedule=instantiate(config["schedule"], _convert_="all"),
        strategy=strategy,
        spec=BuildSpec(
            world,
            Precision(config["precision"]["name"]),
            Sharding(**config["sharding"]),
            sizes.micro_batch_size,
            sizes.accumulate,
            trainer["max_grad_norm"],
            instantiate(config["compression"], _convert_="all") if config["compression"] else None,
            trainer["compile"],
            trainer["decay_norms_and_biases"],
        ),
        sizes=sizes,
        limits=limits_of(trainer),
        reporter=reporter,
        snapshots=Snapshots(
            strategy, world, run_dir, info.get("run_id", "run"), save_plan_of(config["checkpoint"]), seed
        ),
        resume=starting_point(run_dir, info, world),
        control=control,
        alternatives=partial(alternatives_of, config, make_model, info.get("overrides", [])),
    )


def model_of(config: dict[str, Any]) -> nn.Module:
    """The same draw on every rank and under every strategy, whatever was drawn before."""
    torch.manual_seed(config["seed"])
    model: nn.Module = instantiate(config["model"], _convert_="all")
    return recompute_activations(model, config["trainer"]["activation_checkpointing"])


def limits_of(trainer: dict[str, Any]) -> Limits:
    """When the loop stops, logs, evaluates."""
    keys = ("epochs", "max_steps", "log_every", "eval_every", "on_nonfinite", "profile_every")
    return Limits(*(trainer[key] for key in keys))


def save_plan_of(saving: dict[str, Any]) -> SavePlan:
    """Which checkpoints are kept."""
    return SavePlan(saving["every"], saving["keep"], saving["monitor"], saving["async"])


def alternatives_of(
    config: dict[str, Any], make_model: Callable[[], nn.Module], overrides: Sequence[str]
) -> "Alternatives":
    """The other ways to train the same."""
    from src.checks.alternatives import alternatives  # only a search asks

    with torch.device("meta"):
        model = make_model()
    return alternatives(config, model, overrides)


def announce(config: dict[str, Any], experiment: Experiment) -> None:
    """The first lines of a run: what runs where."""
    if not experiment.world.is_main:
        return
    world, sizes = experiment.world, experiment.sizes
    log.info("run folder %s", experiment.run_dir)
    if not task_class(config).reads_data:  # of which strategy and batch mean nothing, or are the task's own to tell
        return
    log.info(
        "strategy %s, sharding %s, precision %s; %d rank(s) on %s over %s, %d thread(s) each",
        strategy_name(config),
        experiment.spec.sharding.level,
        experiment.spec.precision.name,
        world.world_size,
        world.device.type,
        dist.get_backend(),
        torch.get_num_threads(),
    )
    log.info(
        "batch %d = %d a micro-batch x %d accumulated x %d data rank(s)",
        sizes.global_batch_size, sizes.micro_batch_size, sizes.accumulate, sizes.data_parallel_size,
    )  # fmt: skip
