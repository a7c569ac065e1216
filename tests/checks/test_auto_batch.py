"""trainer.micro_batch_size=auto, against the formulas that it goes by."""

from pathlib import Path

import pytest

from src.checks import auto_batch
from src.checks.auto_batch import SHARE, largest_size
from src.errors import Refused
from tests.composing import composed

GIB = 2**30
MODEL = ["model=gpt_tiny", "strategy=fsdp", "launch.nproc=2", "launch.device=cpu"]


def settled(*words: str) -> int:
    config, problems = composed(*MODEL, "trainer.micro_batch_size=auto", *words)
    assert not problems, problems
    size: int = config["trainer"]["micro_batch_size"]
    return size


def planned_peak(size: int) -> int:
    """Bytes of a rank, of the same experiment with the size given."""
    from src.control import Control
    from src.plan.formula import fullest, plan
    from src.run import build
    from src.tracking.reporter import SilentReporter
    from src.world import World

    config, _ = composed(*MODEL, f"trainer.micro_batch_size={size}")
    world = World(0, 2, 0, 2, is_imagined=True)
    made = build(config, Path("nowhere"), {}, world, SilentReporter(), Control(world, 600.0, None, None))
    plans = plan(type(made.strategy), made.make_model, made.optimizer, made.data, made.setting)
    return fullest(plans).footprint.peak.bytes


def test_the_largest_power_of_two_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    between = (planned_peak(16) + planned_peak(32)) / 2
    monkeypatch.setattr(auto_batch, "available_bytes", lambda config: between / SHARE)
    config, _ = composed(*MODEL, "trainer.micro_batch_size=1")
    assert largest_size(config, None) == 16
    # Of a kept global batch only what divides it: 24 = 4 x 3 x 2 ranks.
    assert largest_size(config, 24) == 4


def test_a_kept_global_batch_counts_with_all_the_micro_batches_that_make_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = composed("model=mlp", "strategy=ddp", "launch.nproc=2", "launch.device=cpu")
    monkeypatch.setattr(auto_batch, "available_bytes", lambda config: 3.4e6 / SHARE)
    alone = largest_size(config, None)
    # 2^16 samples in micro-batches of 256 and smaller: all of them wait on the device, 260 bytes each.
    with pytest.raises(Refused, match="not one sample fits"):
        largest_size(config, 2**16)
    assert alone >= 1


@pytest.mark.timeout(120)
def test_the_size_stands_in_the_configuration_before_anything_starts() -> None:
    size = settled()
    assert size >= 1
    assert size & (size - 1) == 0


@pytest.mark.timeout(120)
def test_where_not_one_sample_fits_that_is_one_line() -> None:
    words = ["task=plan", "task.device_memory_gib=0.000001", "trainer.micro_batch_size=auto"]
    _, problems = composed(*MODEL, *words)
    assert [line.split(":")[0] for line in problems] == ["trainer.micro_batch_size=auto"]
    assert "not one sample fits" in problems[0]


@pytest.mark.timeout(120)
def test_a_pipeline_finds_a_size_that_leaves_it_enough_micro_batches() -> None:
    """Of 64 samples: two stages want two micro-batches or more, which one of all 64 would not be."""
    words = ["strategy=pp", "trainer.accumulate=null", "trainer.global_batch_size=64"]
    assert settled(*words) == 32


@pytest.mark.slow
def test_what_can_not_be_walked_through_is_refused_for_what_it_is() -> None:
    split = ["model=cnn", "strategy=tp", "launch.nproc=2", "launch.device=cpu"]
    _, problems = composed(*split, "trainer.micro_batch_size=auto")
    assert len(problems) == 1
    assert "does not say how its layers are split" in problems[0]
    for model, said in (("CountsItsInputs", "whose shape depends on values"), ("LooksAtItsInputs", "a tensor's value")):
        own = ["model=mlp", f"model._target_=tests.own_models.{model}", "launch.device=cpu"]
        _, [line] = composed(*own, "trainer.micro_batch_size=auto")
        assert said in line
        assert "Give trainer.micro_batch_size a number." in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trainer.micro_batch_size=foo"], "is no number of samples"),
        (["trainer.micro_batch_size=1.5"], "is no number of samples"),
        (["trainer.micro_batch_size=true"], "is no number of samples"),
        (["trainer.micro_batch_size=auto", "trainer.accumulate=null"], "both null"),
        (["trainer.micro_batch_size=auto", "trainer.global_batch_size=8"], "both given"),
    ],
    ids=str,
)
def test_what_is_no_size_is_refused(words: list[str], said: str) -> None:
    _, problems = composed(*words)
    assert len(problems) == 1
    assert said in problems[0]


def test_gpus_that_can_not_be_asked_are_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_batch, "ASK_GPUS", "raise RuntimeError('no NVIDIA driver')")
    with pytest.raises(Refused, match=r"can't be asked for their free memory \(RuntimeError: no NVIDIA driver\)"):
        auto_batch.free_gpu_bytes()
