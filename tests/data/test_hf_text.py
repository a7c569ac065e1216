"""data=hf_text: from files to micro-batches."""

import errno
import json
import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from src.data import hf_text, tokenized
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


def load(tokenizer, tmp_path, files, **given):
    given = {"sequence_length": 64, "test_share": 0.1, "root": str(tmp_path / "root"), **given}
    data = HFText(tokenizer, files=[str(file) for file in files], **given)
    data.prepare()
    return data, *data.load(CPU, 0)


def documents_of(*sources):
    """The tokens before the padding of packing=none's samples, in the order of their ids."""
    rows = [row for source in sources for row in everything(source).inputs.tolist()]
    return [[token for token in row if token != PAD] for row in rows]


def test_what_is_given_is_masked_and_what_is_answered_learnt_to_the_token(tmp_path, tokenizer_with_bos):
    records = [{"q": f"Add {i} and 1. ", "a": f"It is {i + 1}."} for i in range(10)]
    file = write_lines(tmp_path / "questions.jsonl", records)
    keys = {"prompt_key": "q", "response_key": "a"}
    expected = {}
    for record in records:
        prompt = [0, *tokens_of(tokenizer_with_bos, record["q"])]
        answer = [*tokens_of(tokenizer_with_bos, record["a"]), EOS]
        expected[tuple(prompt + answer)] = [-100] * (len(prompt) - 1) + answer
    for packing in ("none", "documents"):
        _, train, test = load(tokenizer_with_bos, tmp_path, [file], packing=packing, **keys)
        found = {}
        for source in (train, test):
            batch = everything(source)
            tokens = batch.inputs[:, 0] if packing == "documents" else batch.inputs
            for row, targets in zip(tokens.tolist(), batch.targets.tolist(), strict=True):
                begins = [i for i, token in enumerate(row) if token in (0, PAD)]
                for begin, end in zip(begins, [*begins[1:], 64], strict=True):
                    if row[begin] == 0:
                        found[tuple(row[begin:end])] = targets[begin : end - 1]
                        assert targets[end - 1] == -100
        assert found == expected


def test_windows_run_on_into_the_next_document(tmp_path, lines, tokenizer):
    _, train, test = load(tokenizer, tmp_path, [lines], packing="windows", test_share=0.2)
    row = everything(train).inputs.flatten().tolist()
    documents = {(*tokens_of(tokenizer, text), EOS): i for i, text in enumerate(TEXTS)}
    ends = [i + 1 for i, token in enumerate(row) if token == EOS]
    order = [documents[tuple(row[a:b])] for a, b in zip([0, *ends], ends, strict=False)]
    assert order == sorted(order), "the training documents in their order"
    assert everything(train).targets.flatten().tolist()[:-1] == row[1:]
    assert test.num_samples >= 1
    assert train.targets_per_sample == 64


def test_a_document_too_long_is_cut_and_no_target_lost(tmp_path, tokenizer):
    text = "a rather long text without end, " * 30
    file = write_lines(tmp_path / "long.jsonl", [{"text": text}, {"text": "short"}, {"text": "short"}])
    _, train, test = load(tokenizer, tmp_path, [file], sequence_length=16)
    learnt = [t for source in (train, test) for t in everything(source).targets.flatten().tolist() if t != -100]
    documents = [[*tokens_of(tokenizer, words), EOS] for words in (text, "short", "short")]
    assert sorted(learnt) == sorted(token for document in documents for token in document[1:])


def test_json_text_and_parquet_give_the_same_documents(tmp_path, tokenizer):
    import pyarrow
    from pyarrow import parquet

    texts = [f"text number {i}\nof two lines" for i in range(8)]
    written = {"lines": write_lines(tmp_path / "a.jsonl", [{"text": text, "n": 1} for text in texts])}
    written["array"] = tmp_path / "a.json"
    written["array"].write_text(json.dumps([{"text": text} for text in texts], indent=1))
    written["with blank lines, a mark, and columns of mixed types"] = tmp_path / "b.jsonl"
    mixed = [json.dumps({"text": text, "n": n}) for text, n in zip(texts, [1, "x", None, [], {}, 2, 3, 4], strict=True)]
    (tmp_path / "b.jsonl").write_text("\ufeff" + "\n\n".join(mixed))
    written["parquet"] = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": texts, "n": list(range(8))}), written["parquet"])
    written["paragraphs"] = tmp_path / "a.txt"
    written["paragraphs"].write_text("\n\n".join(texts))
    found = {
        name: documents_of(*load(tokenizer, tmp_path, [file], packing="none", text_unit="paragraph")[1:])
        for name, file in written.items()
    }
    for name, documents in found.items():
        assert documents == found["lines"], name
    assert sorted(found["lines"]) == sorted([*tokens_of(tokenizer, text), EOS] for text in texts)


@pytest.mark.parametrize(("unit", "count"), [("file", 2), ("paragraph", 4), ("line", 6)])
def test_text_files_are_cut_into_documents(tmp_path, tokenizer, unit, count):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"{name} one\ntwo\n\n \nthree\n")
    _, train, test = load(tokenizer, tmp_path, [tmp_path / "*.txt"], packing="none", text_unit=unit)
    assert train.num_samples + test.num_samples == count


def test_a_data_set_by_name_is_read_through_datasets_and_asked_for_once(tmp_path, tokenizer, monkeypatch):
    import datasets

    folder = tmp_path / "stored"  # stands for the hub's
    folder.mkdir()
    write_lines(folder / "train.jsonl", [{"text": text} for text in TEXTS])
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    read = datasets.load_dataset
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, *_, **given: read({"org/stored": str(folder)}[name], **given)
    )
    given = {"sequence_length": 64, "root": str(tmp_path / "root"), "packing": "none", "test_share": 0.1}
    data = HFText(tokenizer, name="org/stored", **given)
    data.prepare()
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked again"))
    data.prepare()
    by_name = documents_of(*data.load(CPU, 0))
    monkeypatch.undo()
    lines = write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    assert by_name == documents_of(*load(tokenizer, tmp_path, [lines], packing="none")[1:])


def test_text_is_tokenised_once_by_content_and_ranks_map_it(tmp_path, lines, tokenizer, capfd):
    data, train, _ = load(tokenizer, tmp_path, [lines])
    assert "tokenising 1 file(s)" in capfd.readouterr().err
    assert isinstance(train.tokens.tokens, np.memmap)
    assert train.tokens.tokens.dtype == np.uint16
    moved = tmp_path / "elsewhere" / "renamed.jsonl"
    moved.parent.mkdir()
    moved.write_bytes(lines.read_bytes())
    # Another packing, length or split, and the same content under another name: nothing is tokenised again.
    load(tokenizer, tmp_path, [moved], sequence_length=32, packing="none", split_seed=3)
    assert capfd.readouterr().err == ""
    lines.write_text(lines.read_text().replace("document 7 ", "document 8 "))
    _, changed, _ = load(tokenizer, tmp_path, [lines])
    assert "tokenising 1 file(s)" in capfd.readouterr().err
    assert not np.array_equal(changed.tokens.tokens, train.tokens.tokens)
    # A rank looks up what `prepare` noted; it reads no file, and loads no tokenizer.
    data = HFText(tokenizer, 64, [str(lines)], root=str(tmp_path / "root"), test_share=0.1)
    data.fetch = lambda tokenize: pytest.fail("a rank read the files")
    data.load(CPU, 0)


def test_two_processes_tokenise_once(tmp_path, lines, tokenizer):
    (tmp_path / "record").touch()
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=prepare_slowly, args=(tmp_path, lines, tokenizer)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    assert (tmp_path / "record").read_text() == "once\n"
    assert not list((tmp_path / "root").glob(".partial*"))


def prepare_slowly(tmp_path, lines, tokenizer):
    def slowly(*arguments, **given):
        with (tmp_path / "record").open("a") as record:
            record.write("once\n")
        time.sleep(0.3)
        tokenized.tokenize(*arguments, **given)

    HFText(tokenizer, 64, [str(lines)], root=str(tmp_path / "root")).fetch(slowly)


def test_forked_ranks_that_were_not_prepared_for_note_at_the_same_time(tmp_path, lines, tokenizer):
    data = HFText(tokenizer, 64, [str(lines)], root=str(tmp_path / "root"))
    context = multiprocessing.get_context("fork")
    meeting = context.Barrier(2)
    both = [context.Process(target=load_together, args=(data, meeting)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    assert len(list((tmp_path / "root" / "notes").iterdir())) == 1


def load_together(data, meeting):
    """The note is put in its place when the other process has written its own as well."""
    replace = Path.replace

    def replace_together(path, target):
        meeting.wait(30)
        return replace(path, target)

    Path.replace = replace_together
    data.load(CPU, 0)


def test_what_is_complete_serves_where_nothing_can_be_written(tmp_path, lines, tokenizer, monkeypatch):
    data, train, _ = load(tokenizer, tmp_path, [lines])
    [note] = (tmp_path / "root" / "notes").iterdir()
    before = note.stat()
    data.prepare()
    assert (note.stat().st_ino, note.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns), "written again"
    note.unlink()

    def refuse(**given):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(hf_text, "TemporaryDirectory", refuse)
    _, again, _ = load(tokenizer, tmp_path, [lines])
    assert torch.equal(everything(again).inputs, everything(train).inputs)
    assert not list((tmp_path / "root" / "notes").iterdir())


def test_limit_keeps_the_first_samples_and_the_test_set(tmp_path, lines, tokenizer):
    _, train, test = load(tokenizer, tmp_path, [lines])
    _, limited, same = load(tokenizer, tmp_path, [lines], limit=2)
    assert limited.num_samples == 2 < train.num_samples
    assert torch.equal(everything(limited).inputs, everything(train).inputs[:2])
    assert torch.equal(everything(same).inputs, everything(test).inputs)


@pytest.mark.parametrize("packing", ["documents", "windows", "none"])
def test_an_example_looks_as_a_micro_batch_does_and_padding_is_masked(tmp_path, lines, tokenizer, packing):
    data, train, _ = load(tokenizer, tmp_path, [lines], packing=packing, test_share=0.2)
    batch, example = fetch(train, [0, 1, 0], num_real=2), data.example(3)
    assert (batch.targets[2] == -100).all()
    assert not torch.equal(batch.targets[0], batch.targets[2])
    for told, given in zip(example, batch, strict=True):
        assert (told.shape, told.dtype, told.stride()) == (given.shape, given.dtype, given.stride())
