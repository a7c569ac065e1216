"""task=profile as a user runs it: over loopback, which costs next to nothing, and over a link that is really slow."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from src.profiling.trace import STEP, read_events
from tests.command import TRAIN, Outcome, environment, metrics, summary, train
from tests.composing import composed

PROFILE = ["task=profile", "launch.nproc=2", "launch.device=cpu", "tracking=off"]
SMALL = ["model=mlp", "model.hidden=[16]", "data.limit=256", "task.steps=2", "task.samples=4"]

#: To be run in a network of its own: its loopback carries 0.5 Gbit/s. The burst must hold a packet, of up to 64 KiB.
SLOW_LINK = "ip link set lo up && tc qdisc add dev lo root tbf rate 500mbit burst 256kb latency 400ms"


def parts_add_up(found: dict[str, Any]) -> bool:
    names = ("compute_seconds", "exposed_comm_seconds", "data_seconds", "idle_seconds")
    return sum(found[name] or 0.0 for name in names) == pytest.approx(found["step_seconds"])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_profile_adds_up_and_leaves_a_trace_of_every_rank(tmp_path: Path, strategy: str) -> None:
    done = train(tmp_path, *PROFILE, *SMALL, f"strategy={strategy}")
    assert done.code == 0, done.text
    run_dir = done.run_dir()
    found = summary(run_dir)["profile"]
    assert parts_add_up(found)
    assert (
        f"with and without the {'all-reduces' if strategy == 'ddp' else 'reductions'} of gradients" in found["method"]
    )
    assert found["exposed_comm_noise_seconds"] > 0
    assert found["hidden_comm_fraction"] is None or 0 <= found["hidden_comm_fraction"] <= 1
    [record] = metrics(run_dir, "profile")
    assert record["hidden_comm_fraction"] == found["hidden_comm_fraction"]
    assert f"communication hidden: {found['hidden']}" in done.stdout
    for world_rank in range(2):
        events = read_events(run_dir / f"trace_rank_{world_rank}.json.gz")
        assert sum(event.get("cat") == "user_annotation" and event["name"] == STEP for event in events) == 2
    assert "Profiler" not in done.stderr, "kineto's own words"
    assert not (run_dir / "model.safetensors").exists(), "a profile trains nothing to keep"


def test_a_profile_begins_past_a_compressors_warm_up(tmp_path: Path) -> None:
    done = train(tmp_path, *PROFILE, *SMALL, "task.warmup=2", "compression=topk", "compression.warmup_steps=5")
    assert done.code == 0, done.text
    # 5 dense steps and a first compressed one instead of the 2, 2 in the trace, 1 + 4 by the clock.
    [record] = metrics(done.run_dir(), "profile")
    assert record["step"] == 6 + 2 + 5


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["strategy=fsdp1"], "strategy=fsdp1 can't leave out its communication"),
        (["strategy=single", "launch.nproc=1"], "there is one rank"),
    ],
)
def test_what_can_not_be_measured_is_said_and_no_number_stands_for_it(
    tmp_path: Path, words: list[str], why: str
) -> None:
    done = train(tmp_path, *PROFILE, *SMALL, *words)
    assert done.code == 0, done.text
    found = summary(done.run_dir())["profile"]
    assert found["hidden"].startswith(f"not measured ({why}")
    assert found["exposed_comm_seconds"] is None
    assert not {"comm_seconds", "hidden_comm_seconds", "hidden_comm_fraction"} & found.keys()
    assert parts_add_up(found)


def test_too_few_steps_or_samples_are_refused():
    _, problems = composed(*PROFILE, "task.warmup=1", "task.steps=0", "task.samples=2")
    assert problems == [
        "task.warmup=1 is less than 2; choose 2 or more.",
        "task.steps=0 is less than 1; choose 1 or more.",
        "task.samples=2 is less than 3; choose 3 or more.",
    ]


def over_slow_link(cwd: Path, *overrides: str) -> Outcome:
    """python train.py <overrides> where two ranks reach each other by 0.5 Gbit/s, both directions together."""
    command = [sys.executable, str(TRAIN), *overrides]
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", f'{SLOW_LINK} && exec "$@"', "sh", *command],
        cwd=cwd,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Outcome(done.returncode, done.stdout, done.stderr, cwd)


@pytest.fixture
def slow_link() -> None:
    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"a slow link needs {', '.join(missing)} (Debian: iproute2, util-linux)")
    tried = subprocess.run(["unshare", "-n", "sh", "-c", SLOW_LINK], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"a slow link needs root and traffic control: {tried.stderr.strip()}")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("slow_link")
def test_many_buckets_hide_communication_that_one_bucket_can_not(tmp_path: Path) -> None:
    # Six layers of 1 MiB: 12 MiB both ways, 0.2 s on this link. One bucket is full when backward is over: none of its
    # all-reduce has anything beside it. With a bucket a layer, each has 50 ms of backward for 34 ms of sending, but
    # the last: a sixth stays exposed, and what the machine's other work adds.
    hidden = {}
    for bucket_cap_mb in (100, 1):
        folder = tmp_path / str(bucket_cap_mb)
        folder.mkdir()
        done = over_slow_link(
            folder,
            *PROFILE,
            "model=mlp",
            "~model.hidden",
            "model._target_=tests.own_models.LayersThatTakeTheirTime",
            "+model.layer_seconds=0.05",
            "trainer.micro_batch_size=8",
            "task.steps=2",
            "task.samples=10",
            f"strategy.bucket_cap_mb={bucket_cap_mb}",
        )
        assert done.code == 0, done.text
        found = summary(done.run_dir())["profile"]
        print(f"bucket_cap_mb={bucket_cap_mb}: {found['hidden']}")
        assert found["comm_seconds"] > 0.15
        hidden[bucket_cap_mb] = found["hidden_comm_fraction"]
        assert hidden[bucket_cap_mb] is not None, found["hidden"]
    assert hidden[100] < 0.2, hidden
    assert hidden[1] > hidden[100] + 0.3, hidden
