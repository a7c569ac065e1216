"""data=hf_text: from files to micro-batches."""

import pytest
import torch

from src.data.hf_text import HFText
from src.data.tokenizer import load_tokenizer
from tests.composing import run_in
from tests.data.fetching import CPU, fetch
from tests.data.texts import write_lines, write_tokenizer

EOS, PAD = 1, 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "bpe"))


@pytest.fixture(scope="module")
def tokenizer_with_bos(tmp_path_factory):
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "bpe", bos=True))


def tokens_of(tokenizer, text):
    return load_tokenizer(tokenizer)(text, add_special_tokens=False)["input_ids"]


def everything(source):
    return fetch(source, range(source.num_samples))


TEXTS = [f"document {i} " + "of words " * (i % 7) for i in range(40)]


@pytest.fixture
def lines(tmp_path):
    return write_lines(tmp_path / "texts.jsonl", [{"text": text, "other": i} for i, text in enumerate(TEXTS)])


def test_whole_documents_are_packed_and_none_sees_another(tmp_path, lines, tokenizer):
    data = HFText(tokenizer, 64, [str(lines)], root=str(tmp_path / "root"), test_share=0.1)
    data.prepare()
    found = []
    for source in data.load(CPU, 0):
        batch = everything(source)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert batch.inputs.shape == (source.num_samples, 2, 64)
        for (tokens, positions), targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            begins = [i for i, position in enumerate(positions) if position == 0]
            for begin, end in zip(begins, [*begins[1:], 64], strict=True):
                assert positions[begin:end] == list(range(end - begin))
                document = tokens[begin:end]
                if document[0] == PAD:
                    assert end == 64
                    assert set(document) == {PAD}
                    assert set(targets[begin:end]) == {-100}
                else:
                    assert targets[begin:end] == [*document[1:], -100]
                    found.append(document)
    expected = [[*tokens_of(tokenizer, text), EOS] for text in TEXTS]
    assert sorted(found) == sorted(expected), "every document, whole and once, over both parts"


GPT = ["model=gpt_tiny", "data=hf_text", "model.width=16", "model.heads=2", "model.layers=1", "data.sequence_length=32"]


@pytest.mark.parametrize("packing", ["windows", "none"])
def test_the_tiny_gpt_trains_on_it_with_the_tokenizers_vocabulary(pool, tmp_path, lines, tokenizer, packing):
    result = run_in(
        pool, 2, tmp_path / "run", *GPT, f"data.files=[{lines}]", f"data.tokenizer={tokenizer}",
        f"data.root={tmp_path / 'root'}", f"data.packing={packing}", "data.test_share=0.2",
        "trainer.micro_batch_size=4", "trainer.max_steps=3",
    )  # fmt: skip
    assert result.weights["head.weight"].shape == (320, 16)
    assert len(result.train) == 3
    assert result.evaluations[-1]["perplexity"] < 400
