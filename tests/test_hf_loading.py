"""Loading a model over ranks: who holds how much meanwhile, and that every strategy goes on from the same weights."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from src.batch import MicroBatch
from src.meter import StorageMeter
from src.models.hf_causal_lm import HFCausalLM
from src.models.hf_lora import Lora
from src.precision import Precision
from src.sharding import Sharding
from src.strategies import deepspeed_engine
from src.strategies.base import BuildSpec, Strategy
from src.weights import filled
from src.world import World
from tests.composing import Result, composed, run_config, run_in
from tests.models.hf import LLAMA, loaded, saved, tokens
from tests.workers import Pool

#: Eight layers, whose tensors are small beside the whole.
SHAPE = {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 128}


def strategy_named(name: str) -> Strategy:
    from src.strategies.deepspeed import DeepSpeed
    from src.strategies.fsdp import FSDP2
    from src.strategies.fsdp1 import FSDP1

    return {"fsdp": FSDP2, "fsdp1": FSDP1, "deepspeed": DeepSpeed}[name]()


def held_while_built(world: Any, name: str, folder: str) -> dict[str, int]:
    """In a worker: bytes, the most that a rank holds until it has its part of a folder's model, and sizes of that."""
    torch.manual_seed(0)
    model = HFCausalLM(folder)
    meter, peaks = StorageMeter(), []

    def read_weights() -> dict[str, Tensor]:
        values = HFCausalLM.read_weights(model)
        for tensor in values.values():
            meter.add(tensor)  # transformers reads in threads of its own, where no meter looks
        return values

    def shard(*arguments: Any) -> None:
        original(*arguments)
        peaks.append(meter.peak)  # before the engine makes its buckets, of the model's size at most

    model.__dict__["read_weights"] = read_weights
    original, deepspeed_engine.shard = deepspeed_engine.shard, shard
    strategy = strategy_named(name)
    spec = BuildSpec(world, Precision("fp32"), Sharding("zero3"), micro_batch_size=1)
    tensors = [p.numel() * p.element_size() for p in model.parameters()]
    layer = sum(p.numel() * p.element_size() for p in model.units()[0].parameters())
    try:
        with meter:
            strategy.build(model, partial(torch.optim.SGD, lr=0.1), spec)
    finally:
        deepspeed_engine.shard = original
    peak = peaks[0] if peaks else meter.peak
    strategy.close()
    return {"peak": peak, "whole": sum(tensors), "tensor": max(tensors), "layer": layer}


@pytest.mark.parametrize("name", ["fsdp", "fsdp1", "deepspeed"])
def test_no_rank_but_the_first_ever_holds_the_whole_model_and_that_one_once(
    name: str, pool: Pool, tmp_path: Path
) -> None:
    folder = str(saved(tmp_path / "llama", **SHAPE))
    first, *others = pool.run(4, held_while_built, name, folder)
    whole, layer = first["whole"], first["layer"]
    # What is under way beside a rank's quarter: FSDP1 makes one flat tensor of a unit before it splits it (the tensors,
    # the flat one, its part), the others split tensor by tensor. A few buffers of 32 bytes come on top.
    under_way = 3 * (max(layer, whole - 8 * layer) if name == "fsdp1" else first["tensor"]) + 4096
    for other in others:
        assert whole // 4 <= other["peak"] <= whole // 4 + under_way < whole
    # The first reads it once, and lets each tensor go when it has given it out.
    assert whole <= first["peak"] <= whole + whole // 4 + under_way < 2 * whole


def buffers_of_a_bf16_run(world: Any) -> set[torch.dtype]:
    """In a worker: types of a Llama's buffers after a step of FSDP1, which casts them when it first runs."""
    torch.manual_seed(0)
    strategy = strategy_named("fsdp1")
    model = HFCausalLM(None, pretrained=False, config=LLAMA)
    strategy.build(model, partial(torch.optim.SGD, lr=0.1), BuildSpec(world, Precision("bf16"), Sharding("zero3")))
    strategy.forward_backward([MicroBatch(tokens(), tokens())], 32 * world.world_size)
    found = {buffer.dtype for buffer in model.buffers()}
    strategy.close()
    return found


def test_rotary_frequencies_are_not_rounded(pool: Pool) -> None:
    assert pool.run(2, buffers_of_a_bf16_run) == [{torch.float32}] * 2


COMMON = [
    "model=hf_causal_lm",
    "data=text",
    "data.sequence_length=32",
    "data.limit=40",
    "trainer.epochs=1",
    "trainer.global_batch_size=8",
    "trainer.micro_batch_size=null",
    "trainer.accumulate=2",
    "trainer.max_steps=4",
    "trainer.max_grad_norm=0.5",
    "optimizer.lr=0.01",
    "checkpoint.every=4",
]
ENGINES = {
    "ddp": ["strategy=ddp"],
    "fsdp": ["strategy=fsdp"],
    "fsdp1": ["strategy=fsdp1"],
    "zero3": ["strategy=deepspeed", "sharding=zero3"],
    "zero1": ["strategy=deepspeed", "sharding=zero1"],
}
KINDS = {
    "whole": [],
    "tied": [],
    "drawn": ["model.pretrained=false"],
    "adapters": ["model.lora.rank=4"],
    "frozen": ["model.freeze=[model.embed_tokens.*,model.layers.0.*]"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a model, by kind."""
    root = tmp_path_factory.mktemp("models")
    plain, tied = saved(root / "plain"), saved(root / "tied", tie_word_embeddings=True)
    return {kind: str(tied if kind == "tied" else plain) for kind in KINDS}


class References:
    """Runs of strategy=single by kind, each when it is first asked for."""

    def __init__(self, pool: Pool, folders: dict[str, str], root: Path) -> None:
        self.pool, self.folders, self.root = pool, folders, root
        self.made: dict[str, Result] = {}

    def of(self, kind: str) -> Result:
        if kind not in self.made:
            words = [*COMMON, "strategy=single", f"model.name={self.folders[kind]}", *KINDS[kind]]
            self.made[kind] = run_in(self.pool, 1, self.root / kind, *words)
        return self.made[kind]


@pytest.fixture(scope="module")
def references(pool: Pool, folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(pool, folders, tmp_path_factory.mktemp("single"))


#: One of each engine and of each kind; the others take minutes.
QUICK = {("ddp", "adapters"), ("fsdp", "frozen"), ("fsdp1", "drawn"), ("zero3", "tied"), ("zero1", "whole")}
PAIRS = [
    pytest.param(engine, kind, marks=[] if (engine, kind) in QUICK else pytest.mark.slow)
    for engine in ENGINES
    for kind in KINDS
]


@pytest.mark.parametrize(("engine", "kind"), PAIRS)
def test_every_strategy_trains_from_the_same_weights(
    engine: str, kind: str, pool: Pool, folders: dict[str, str], references: References, tmp_path: Path
) -> None:
    overrides = [*COMMON, *ENGINES[engine], f"model.name={folders[kind]}", *KINDS[kind]]
    result, reference = run_in(pool, 2, tmp_path / "run", *overrides), references.of(kind)
    # The bars of tests/test_parity.py.
    assert result.series("loss") == pytest.approx(reference.series("loss"), rel=1e-5)
    assert result.series("grad_norm") == pytest.approx(reference.series("grad_norm"), rel=1e-5)
    assert result.weights.keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        torch.testing.assert_close(result.weights[name], weight, rtol=0, atol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp", "fsdp1", "zero3"])
def test_what_was_trained_sharded_is_exported_for_everybody(
    engine: str, pool: Pool, folders: dict[str, str], tmp_path: Path
) -> None:
    """Trained on two ranks, exported by one, loaded by transformers."""
    model = [f"model.name={folders['tied']}", "model.lora.rank=4"]
    trained = run_in(pool, 2, tmp_path / "run", *COMMON, *ENGINES[engine], *model)
    where = f"task.checkpoint={tmp_path / 'run'}"
    words = ["launch.nproc=1", "launch.device=cpu", "tracking=off", *COMMON, "task=export", where, "strategy=single"]
    config, problems = composed(*words, *model)
    assert problems == []
    (tmp_path / "export").mkdir()
    pool.run(1, run_config, config, str(tmp_path / "export"), {})
    ours = filled(HFCausalLM(folders["tied"], lora=Lora(rank=4)), World()).eval()
    ours.load_state_dict(trained.weights)
    with torch.no_grad():
        theirs = loaded(tmp_path / "export" / "model")(tokens()).logits
        # Merged, an adapter's part is added to the weights before, not after, the product with the input.
        torch.testing.assert_close(theirs, ours(tokens()), rtol=0, atol=1e-5)
