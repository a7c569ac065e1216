"""DeepSpeed's JSON comes from the experiment's own values, and nothing may contradict them."""

import json
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from src.sharding import Sharding
from src.strategies.deepspeed import DeepSpeed
from src.strategies.deepspeed_config import Given, engine_config
from tests.command import QUICK, REPOSITORY, environment, train
from tests.composing import composed

CPU = ["strategy=deepspeed", "launch.device=cpu", "launch.nproc=2"]


def given(**changes):
    values = {
        "micro_batch_size": 2,
        "accumulate": 2,
        "world_size": 2,
        "device_type": "cpu",
        "precision": "fp32",
        "sharding": Sharding("zero2"),
        "max_grad_norm": None,
    }
    return Given(**{**values, **changes})


def problems(*overrides):
    _, found = composed(*CPU, "trainer.micro_batch_size=2", "trainer.accumulate=2", *overrides)
    return found


def test_a_train_batch_size_that_disagrees_is_refused_with_the_arithmetic():
    [line] = problems("+strategy.config.train_batch_size=7")
    assert "strategy.config.train_batch_size=7" in line
    assert "2 x 2 x 2 = 8" in line
    assert "trainer.global_batch_size" in line


def test_the_refusal_comes_before_anything_is_started(tmp_path):
    outcome = train(tmp_path, *QUICK, "strategy=deepspeed", "+strategy.config.train_batch_size=7")
    assert outcome.code == 2, outcome.text
    assert "64 x 1 x 2 = 128" in outcome.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train_micro_batch_size_per_gpu=3", ["8 / (2 x 2) = 2", "trainer.micro_batch_size"]),
        ("gradient_accumulation_steps=4", ["8 / (2 x 2) = 2", "trainer.accumulate"]),
        ("gradient_clipping=0.5", ["trainer.max_grad_norm=null"]),
        ("zero_optimization.stage=3", ["sharding=zero2, which is stage 2"]),
        ("zero_optimization.stage=null", ["sharding=zero2, which is stage 2"]),
        ("fp16.enabled=true", ["precision=fp32"]),
        ("bf16.enabled=true", ["precision=fp32"]),
        ("torch_autocast.enabled=true", ["precision=fp32"]),
        ("optimizer.type=Adam", ["optimizer="]),
        ("scheduler.type=WarmupLR", ["schedule="]),
        ("gradient_allreduce_op=sum", ["mean"]),
        ("managed_gradient_accumulation=false", ["trainer.accumulate"]),
    ],
)
def test_an_override_that_contradicts_the_experiment_is_refused(override, words):
    [line] = problems(f"++strategy.config.{override}")
    assert f"strategy.config.{override.split('.')[0]}" in line
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    "override",
    [
        "train_batch_size=8",
        "gradient_clipping=0.0",
        "zero_optimization.stage=2",
        "fp16.enabled=false",
        "fp16.hysteresis=1",
        "zero_optimization.round_robin_gradients=true",
        "wall_clock_breakdown=true",
    ],
)
def test_an_override_that_agrees_or_adds_is_accepted(override):
    assert problems(f"++strategy.config.{override}") == []


def test_all_contradictions_are_reported_at_once():
    found = problems("+strategy.config.train_batch_size=7", "+strategy.config.gradient_clipping=1", "precision=fp16")
    assert len(found) == 3


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["precision=fp16"], "CPU accelerator has no fp16"),
        (["sharding=zero2", "sharding.offload=all"], "ZeRO stage 3"),
        (["sharding=none", "sharding.offload=optimizer"], "shards nothing"),
        (["sharding=hybrid"], "sharding=hybrid shards parameters inside groups"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused_with_a_remedy(overrides, words):
    [line] = problems(*overrides)
    assert words in line
    assert "Use " in line


def test_a_missing_package_is_refused(monkeypatch):
    monkeypatch.setattr("src.checks.rules.find_spec", lambda name: None)
    assert any("pip install deepspeed" in line for line in problems())


def is_plain(value):
    if type(value) is dict:
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    if type(value) is list:
        return all(map(is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


def test_the_json_is_plain_all_the_way_down():
    # Nested OmegaConf containers, of which dict(...) would unwrap the outermost only, and an interpolation.
    node = OmegaConf.create(
        {
            "config": {"comms_logger": {"prof_ops": ["all_reduce", "${other}"]}, "x": [{"betas": [0.9, 0.95]}]},
            "other": "b",
        }
    )
    built = engine_config(given(), DeepSpeed().options, node.config)
    assert is_plain(built)
    assert json.loads(json.dumps(built)) == built
    assert built["comms_logger"] == {"prof_ops": ["all_reduce", "b"]}
    assert built["x"] == [{"betas": [0.9, 0.95]}]


def test_the_json_needs_no_deepspeed():
    code = "import sys; sys.modules['deepspeed'] = None; import tests.strategies.test_deepspeed_config as t;" + (
        "print(t.engine_config(t.given(), t.DeepSpeed().options, {})['train_batch_size'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "8", done.stderr


def test_overrides_are_merged_deeply_and_last():
    built = engine_config(given(), DeepSpeed().options, {"zero_optimization": {"round_robin_gradients": True}})
    assert built["zero_optimization"]["round_robin_gradients"] is True
    assert built["zero_optimization"]["stage"] == 2


def test_the_reduce_bucket_is_cut_to_the_model():
    section = engine_config(given(), DeepSpeed(reduce_bucket_size=2e8).options, {}, num_parameters=1000)
    assert section["zero_optimization"]["reduce_bucket_size"] == 1000


def test_sixteen_bit_gradients_travel_in_fp32_unless_told_otherwise():
    def of(precision, communicate_in_fp32):
        strategy = DeepSpeed(communicate_in_fp32=communicate_in_fp32)
        return engine_config(given(precision=precision, device_type="cuda"), strategy.options, {})

    assert of("bf16", True)["torch_autocast"]["lower_precision_safe_modules"] == []
    assert "lower_precision_safe_modules" not in of("bf16", False)["torch_autocast"]
    assert of("fp16", True)["communication_data_type"] == "fp32"
    assert "communication_data_type" not in of("fp16", False)
    assert "torch_autocast" not in of("fp32", True)


def test_memory_is_pinned_for_gpus_only():
    offloaded = Sharding("zero3", None, "all")
    for device_type, pinned in (("cpu", False), ("cuda", True)):
        section = engine_config(given(sharding=offloaded, device_type=device_type), DeepSpeed().options, {})
        host = {"device": "cpu", "pin_memory": pinned}
        assert section["zero_optimization"]["offload_optimizer"] == host
        assert section["zero_optimization"]["offload_param"] == host


def preset(name):
    """The JSON of an experiment on two GPUs, in fp16."""
    config, found = composed(f"experiment={name}", "launch.device=cpu", "launch.nproc=2")
    assert not found
    arguments = {k: v for k, v in config["strategy"].items() if k != "_target_"}
    sharding = Sharding(**config["sharding"])
    trainer = config["trainer"]
    values = given(
        micro_batch_size=trainer["global_batch_size"] // (trainer["accumulate"] * 2),
        accumulate=trainer["accumulate"],
        device_type="cuda",
        precision="fp16",
        sharding=sharding,
        max_grad_norm=trainer["max_grad_norm"],
    )
    strategy = DeepSpeed(**arguments)
    return engine_config(values, strategy.options, strategy.overrides), config["optimizer"]


def test_zero2_offload_has_the_tutorials_numbers():
    built, optimizer = preset("zero2_offload")
    assert built["train_batch_size"] == 32
    assert built["gradient_accumulation_steps"] == 4
    assert built["gradient_clipping"] == 1.0
    assert built["fp16"]["initial_scale_power"] == 16
    assert built["zero_optimization"] == {
        "stage": 2,
        "reduce_bucket_size": 200_000_000,
        "allgather_bucket_size": 200_000_000,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    assert optimizer["_target_"] == "torch.optim.AdamW"
    assert (optimizer["lr"], optimizer["betas"], optimizer["weight_decay"]) == (1e-4, [0.9, 0.999], 0.01)


def test_zero3_offload_has_the_tutorials_numbers():
    built, optimizer = preset("zero3_offload")
    assert built["train_batch_size"] == 256
    assert built["gradient_accumulation_steps"] == 4
    assert built["fp16"]["loss_scale"] == 0  # dynamic
    section = built["zero_optimization"]
    assert section["stage"] == 3
    assert section["reduce_bucket_size"] == section["stage3_prefetch_bucket_size"] == 500_000_000
    assert section["stage3_param_persistence_threshold"] == 100_000
    assert section["offload_optimizer"]["device"] == section["offload_param"]["device"] == "cpu"
    assert optimizer["_target_"] == "torch.optim.AdamW"
    assert (optimizer["lr"], optimizer["betas"], optimizer["weight_decay"]) == (3e-4, [0.9, 0.95], 0.1)
    assert optimizer["eps"] == 1e-8
