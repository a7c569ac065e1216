"""Training on samples of unequal length: one loss over all valid tokens, however the batch is split."""

import math

import pytest
import torch

from src.batch import BatchPlan, BatchSizes
from src.data.hf_text import HFText
from src.data.packing import split
from tests.composing import composed, run_in
from tests.data.fetching import CPU, fetch
from tests.data.texts import PositionsModel, write_lines, write_tokenizer

LENGTH = 32
MODEL = ["model=gpt_tiny", "model._target_=tests.data.texts.PositionsModel", "data=hf_text", "optimizer=sgd"]
STEPS = ["trainer.micro_batch_size=null", "trainer.global_batch_size=12", "trainer.max_steps=4"]
SPLITS = [(1, "single", 3), (2, "ddp", 1), (2, "ddp", 3), (3, "ddp", 2), (2, "fsdp", 2), (3, "fsdp", 1)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "bpe"))


def prepared(root, tokenizer, records, *overrides):
    """The overrides of records that are tokenised, and the data themselves."""
    lines = write_lines(root.with_suffix(".jsonl"), records)
    given = [f"data.files=[{lines}]", f"data.tokenizer={tokenizer}", f"data.root={root}", "data.prompt_key=q"]
    given += ["data.response_key=a", f"data.sequence_length={LENGTH}", *overrides]
    node = composed(*MODEL, "launch.device=cpu", *given)[0]["data"]
    data = HFText(**{key: value for key, value in node.items() if key != "_target_"})
    data.prepare()
    return [*MODEL, *given], data


def questions(count, masked=()):
    """Answers of very different length; in `masked`, the question fills the sequence and nothing is learnt."""
    return [{"q": "q" * (3 * LENGTH if i in masked else i % 5), "a": "a b c d " * (i % 7) + "."} for i in range(count)]


def assert_same_training(result, reference):
    assert result.series("batch_hash") == reference.series("batch_hash")
    assert result.series("loss") == pytest.approx(reference.series("loss"), rel=1e-5)
    assert result.series("grad_norm") == pytest.approx(reference.series("grad_norm"), rel=1e-5, abs=1e-9)
    for name, weight in reference.weights.items():
        torch.testing.assert_close(result.weights[name], weight, rtol=0, atol=1e-5)
    for ours, theirs in zip(result.evaluations, reference.evaluations, strict=True):
        assert ours["samples"] == theirs["samples"]
        assert ours["perplexity"] == pytest.approx(theirs["perplexity"], rel=1e-6)


@pytest.mark.parametrize("packing", ["documents", "none"])
def test_every_split_learns_what_one_big_batch_does(pool, tmp_path, tokenizer, packing):
    records = questions(101, masked=range(3, 101, 4))
    reads = [] if packing == "documents" else ["model._target_=src.models.gpt.GPT", "model.width=16", "model.layers=1"]
    command, data = prepared(
        tmp_path / "root", tokenizer, records, f"data.packing={packing}", "data.test_share=0.21", *reads
    )
    reference = run_in(pool, 1, tmp_path / "whole", "strategy=single", "trainer.accumulate=1", *command, *STEPS)
    train, test = data.load(CPU, 0)
    counts = [valid_in(train, batch.sample_ids) for batch in steps(train.num_samples)]
    for ranks, strategy, accumulate in SPLITS:
        run_dir = tmp_path / f"{ranks}-{strategy}-{accumulate}"
        split_up = [f"strategy={strategy}", f"trainer.accumulate={accumulate}"]
        result = run_in(pool, ranks, run_dir, *split_up, *command, *STEPS)
        assert_same_training(result, reference)
        assert result.evaluations[-1]["samples"] == test.num_samples
        seen = [record["tokens_per_second"] * record["step_seconds"] for record in result.train]
        assert seen == pytest.approx(counts), "tokens are those that are learnt, over all ranks"
        assert not any("mfu" in record for record in result.train), "no peak is known of a CPU"


def steps(num_samples, seed=0):
    """The global batches of the first four steps."""
    plan = BatchPlan(num_samples, 12, seed)
    return [batch for epoch in range(4) for batch in plan.epoch(epoch)][:4]


def valid_in(source, ids):
    return int((fetch(source, ids).targets != -100).sum())


@pytest.mark.parametrize(("strategy", "accumulate"), [("ddp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 3)])
def test_a_masked_micro_batch_rank_or_step_adds_nothing(pool, tmp_path, tokenizer, strategy, accumulate):
    # Of 60 documents 48 train: four steps of 12. In the second, rank 1 of two has no target, in the third nobody; and
    # of the tests' 12 the last ones have none, so that a rank's whole evaluation is masked.
    trained, tested = split(60, 0.2, 0)
    sizes = BatchSizes(12 // (2 * accumulate), accumulate, 2)
    batches = steps(48)
    of_rank_1 = [i for request in batches[1].requests(sizes, data_rank=1) for i in request.ids]
    masked = {*trained[of_rank_1], *trained[batches[2].sample_ids], *tested[6:]}
    command, data = prepared(
        tmp_path / "root", tokenizer, questions(60, masked), "data.packing=none", "data.test_share=0.2",
        "model._target_=src.models.gpt.GPT", "model.width=16", "model.layers=1",
    )  # fmt: skip
    train, _ = data.load(CPU, 0)
    assert (
        valid_in(train, of_rank_1)
        == valid_in(train, batches[2].sample_ids)
        == 0
        < valid_in(train, batches[1].sample_ids)
    )
    reference = run_in(pool, 1, tmp_path / "whole", "strategy=single", "trainer.accumulate=1", *command, *STEPS)
    result = run_in(
        pool, 2, tmp_path / "split", f"strategy={strategy}", f"trainer.accumulate={accumulate}", *command, *STEPS
    )
    assert_same_training(result, reference)
    assert result.series("loss")[2] == result.series("grad_norm")[2] == result.series("tokens_per_second")[2] == 0.0
    assert all(torch.isfinite(weight).all() for weight in result.weights.values())
    # The step without targets does not weigh in the epoch's mean.
    counts = [valid_in(train, batch.sample_ids) for batch in batches]
    mean = sum(loss * count for loss, count in zip(result.series("loss"), counts, strict=True)) / sum(counts)
    assert result.epochs[0]["loss"] == pytest.approx(mean, rel=1e-6)


def test_a_target_on_a_rank_with_few_weighs_as_one_of_many_on_another(pool, tmp_path, tokenizer):
    # Three documents: two to train on, one a rank, with 2 valid targets and with 32 (case GA-15).
    [first, second], _ = split(3, 0.1, 0)
    records = [{"q": "", "a": "some words to test on"}] * 3
    records[first], records[second] = {"q": "a question", "a": "."}, {"q": "", "a": "x y z " * LENGTH}
    command, data = prepared(
        tmp_path / "root", tokenizer, records, "data.packing=none", "data.test_share=0.1",
        "model._target_=src.models.gpt.GPT", "model.width=16", "model.layers=1", "trainer.max_steps=2",
        "trainer.global_batch_size=2", "trainer.micro_batch_size=null", "trainer.accumulate=1",
    )  # fmt: skip
    train, _ = data.load(CPU, 0)
    assert sorted(valid_in(train, [i]) for i in range(2)) == [2, LENGTH]  # "." and the end of the text
    reference = run_in(pool, 1, tmp_path / "one", "strategy=single", *command)
    for strategy in ("ddp", "fsdp"):
        assert_same_training(run_in(pool, 2, tmp_path / strategy, f"strategy={strategy}", *command), reference)


def test_perplexity_is_of_all_tokens_of_the_whole_test_set(pool, tmp_path, tokenizer):
    command, data = prepared(tmp_path / "root", tokenizer, questions(60), "data.test_share=0.35")
    short = [*command, "trainer.micro_batch_size=4", "trainer.max_steps=1", "optimizer.lr=0.0"]
    ways = {1: "strategy=single", 2: "strategy=ddp", 3: "strategy=ddp"}
    results = {ranks: run_in(pool, ranks, tmp_path / str(ranks), way, *short) for ranks, way in ways.items()}
    _, test = data.load(CPU, 0)
    batch = fetch(test, range(test.num_samples))
    model = PositionsModel(320, 128)
    model.load_state_dict(results[1].weights)
    with torch.no_grad():
        logits = model(batch.inputs).double()
    mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)
    for ranks, result in results.items():
        [evaluation] = result.evaluations
        assert evaluation["perplexity"] == pytest.approx(math.exp(mean), rel=1e-6), ranks
        assert evaluation["samples"] == test.num_samples


def test_a_run_goes_on_at_the_exact_sample(pool, tmp_path, tokenizer):
    command, _ = prepared(tmp_path / "root", tokenizer, questions(60), "data.test_share=0.2")
    command += ["trainer.global_batch_size=2", "trainer.micro_batch_size=null", "trainer.accumulate=1", "strategy=ddp"]
    command += ["trainer.max_steps=7", "trainer.epochs=9"]
    unbroken = run_in(pool, 2, tmp_path / "unbroken", *command, "checkpoint.every=4")
    saved = str(tmp_path / "unbroken" / "checkpoints" / "step_00000004")
    result = run_in(pool, 2, tmp_path / "resumed", *command, info={"resume": saved})
    for key in ("batch_hash", "samples", "loss"):
        assert result.series(key) == unbroken.series(key)[4:], key
    for name, weight in unbroken.weights.items():
        assert torch.equal(result.weights[name], weight)
