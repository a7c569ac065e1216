"""What is refused of compressors before anything starts, and what their options say."""

import inspect
from pathlib import Path

import pytest
import torch
import yaml
from hydra.errors import HydraException
from torch._subclasses.fake_tensor import FakeTensorMode

from src.checks.keys import locate
from src.compression.base import Ranks
from src.compression.ledger import all_gather_bytes, all_reduce_bytes, break_even_density
from src.compression.powersgd import PowerSGD
from src.compression.topk import TopK
from src.errors import Refused
from tests.command import QUICK, metrics, summary, train
from tests.composing import CONF, composed

OPTIONS = ["topk", "powersgd", "fp16", "bf16"]
REFUSED = {
    "compression=topk compression.ratio=0": "is no share of the values. Choose more than 0, at most 1.",
    "compression=topk compression.ratio=1.5": "compression.ratio=1.5 is no share of the values.",
    "compression=topk compression.ratio=nan": "compression.ratio=nan is no",
    "compression=topk compression.warmup_steps=-1": "compression.warmup_steps=-1 is no number of steps.",
    "compression=topk compression.selection=random": "selection=random is unknown. Choose exact or sampled.",
    "compression=topk compression.ration=0.1": "ration",
    "compression=powersgd compression.warmup_steps=1": "Use compression.warmup_steps=2 or more.",
    "compression=powersgd compression.matrix_rank=0": "compression.matrix_rank=0 approximates nothing.",
    "compression=powersgd compression.min_compression_rate=0": "compression.min_compression_rate=0 is no factor.",
    "compression=topk strategy.static_graph=true": "strategy.static_graph=true with compression=topk",
    "compression=powersgd strategy.static_graph=true": "strategy.static_graph=true with compression=powersgd",
    "compression=topk strategy.find_unused_parameters=true": "find_unused_parameters=true with compression=topk",
    "compression=topk precision=fp16": "Use precision=bf16, or a compression that keeps nothing.",
    "compression=powersgd precision=fp16": "compression=powersgd keeps what the products miss",
    # 46,342 x 46,342 weights are more than 2^31 - 1; the last layer and their bias come before them in their bucket.
    # Two of 40,000 x 40,000 are less each, and more in one bucket.
    "compression=topk model=mlp model.hidden=[46342,46342]": "one holds 2,148,090,736. Use a compression",
    "compression=topk model=mlp model.hidden=[40000,40000,40000] strategy.bucket_cap_mb=9000": "Lower strategy.bucket",
    "compression=fp16 compression._target_=collections.OrderedDict": "is no Compression; see src/compression/base.py.",
}
ACCEPTED = [
    "compression=topk compression.ratio=1.0",
    "compression=topk precision=bf16 trainer.accumulate=2 trainer.max_grad_norm=1.0",
    "compression=fp16 precision=fp16",
    "compression=bf16 strategy.static_graph=true",
    "compression=fp16 strategy.find_unused_parameters=true",
    "compression=powersgd compression.warmup_steps=2",
    "compression=powersgd model=mlp model.hidden=[46342,46342]",
    "compression=topk model=mlp model.hidden=[40000,40000,40000]",
    "compression=none strategy=fsdp",
]


def problems(words: str) -> list[str]:
    try:
        return composed("launch.device=cpu", "launch.nproc=2", *words.split())[1]
    except HydraException as error:  # for a key that is not there
        return [str(error)]


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_refused_with_a_remedy(words):
    lines = problems(words)
    assert [line for line in lines if REFUSED[words] in line], lines


@pytest.mark.parametrize("words", ACCEPTED)
def test_what_works_is_not_refused(words):
    assert problems(words) == []


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("strategy", sorted(path.stem for path in (CONF / "strategy").glob("*.yaml")))
def test_only_ddp_compresses(option, strategy):
    words = f"strategy={strategy} compression={option}"
    if strategy == "single":
        words += " launch.nproc=1"
    lines = [line for line in problems(words) if line.startswith(f"compression={option} ")]
    if strategy == "ddp":
        assert lines == []
    else:
        [line] = lines
        assert line.endswith("Use strategy=ddp, or compression=none.")


def test_one_command_line_shows_all_of_it_and_exits_2(tmp_path):
    words = ["strategy=fsdp", "compression=topk", "compression.ratio=2", *QUICK]
    outcome = train(tmp_path, *words)
    assert outcome.code == 2
    assert "compression.ratio=2 is no share" in outcome.text
    assert "Use strategy=ddp, or compression=none." in outcome.text
    assert outcome.run_dirs() == []


@pytest.mark.parametrize("make", [lambda: TopK(0), lambda: TopK(selection="x"), lambda: PowerSGD(warmup_steps=1)])
def test_constructors_refuse_the_same(make):
    with pytest.raises(Refused):
        make()


def test_a_run_tells_what_it_sent_in_every_place(tmp_path):
    outcome = train(tmp_path, *QUICK, "compression=topk", "model=mlp")
    assert outcome.code == 0, outcome.text
    assert "0.5" in next(line for line in outcome.text.splitlines() if "of each bucket" in line)
    assert "Warning" not in outcome.text
    records = metrics(outcome.run_dir())
    told = summary(outcome.run_dir())["compression"]
    assert told["steps"] == 2
    assert told["sent_bytes"] == sum(record["sent_bytes"] for record in records)
    assert told["dense_bytes"] == sum(record["dense_bytes"] for record in records)
    # A ratio of 0.01 between two ranks sends 0.01 x 8 where dense sends 4: a fiftieth.
    assert told["sent_bytes"] / told["dense_bytes"] == pytest.approx(0.02, rel=0.02)
    assert all(record["residual_norm"] > 0 for record in records)


@pytest.mark.parametrize(
    ("selection", "device", "is_told"), [("sampled", "cuda", True), ("exact", "cuda", False), ("sampled", "cpu", False)]
)
def test_a_choice_that_waits_for_a_gpu_is_told(selection: str, device: str, is_told: bool) -> None:
    with FakeTensorMode():  # a GPU's parameter, where there is none
        parameter = torch.empty(3, device=device)
    topk = TopK(selection=selection)
    topk.begin(Ranks(2), {parameter: "weight"})
    assert ("waits for the GPU" in topk.announcement()) == is_told


def test_shipped_options_say_every_argument():
    for option in OPTIONS:
        node = yaml.safe_load((Path(CONF) / "compression" / f"{option}.yaml").read_text())
        target = locate(node.pop("_target_"))
        assert node == {name: p.default for name, p in inspect.signature(target).parameters.items()}


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_at_the_break_even_density_both_send_the_same(ranks):
    numel = 8_000_000
    density = break_even_density(ranks)
    assert density == 8 / (ranks * (4 + 4))
    # Values and indices of 4 bytes each, gathered, against a sum of all values.
    assert all_gather_bytes(round(density * numel) * 8, ranks) == pytest.approx(all_reduce_bytes(numel * 4, ranks))
