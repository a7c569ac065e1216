"""What data=hf_text refuses, in one line that names the file, the line and the remedy."""

import pytest

from src.data.hf_text import HFText
from src.errors import Refused
from tests.command_server import serve
from tests.composing import composed
from tests.data.texts import write_lines, write_tokenizer

GOOD = '{"text": "some words to learn"}\n'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "bpe"))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", None, r"data.files: .*a.jsonl names no file"),
        ("a.jsonl", b"", r"data.files: .*a.jsonl is empty"),
        ("a.csv", b"text\n", r"a.csv ends in none of .jsonl, .json, .txt, .parquet"),
        ("a.jsonl", GOOD.encode() * 2 + b'{"text": \n', r"a.jsonl, line 3 is no JSON: .*one object a line"),
        ("a.jsonl", b"\n" + GOOD.encode() + b'{"words": "x", "n": 1}\n', r"a.jsonl, line 3 has no key 'text'; it has"),
        ("a.jsonl", GOOD.encode() + b'{"text": 7}\n', r"a.jsonl, line 2: 'text' is a int, not a text"),
        ("a.jsonl", GOOD.encode() + b'"text"\n', r"a.jsonl, line 2 is a str, not an object"),
        ("a.jsonl", GOOD.encode() + b'{"text": "\\ud800"}\n', r"a.jsonl, line 2: 'text' holds half a character"),
        ("a.jsonl", GOOD.encode() + b'{"text": "caf\xe9"}\n', r"a.jsonl, line 2 is not UTF-8 \(byte 0xe9 at 13\)"),
        ("a.json", b'[{"text": "a b c"}, {"word": 1}]', r"a.json, record 2 has no key 'text'"),
        ("a.json", b'[{"text": "a b c"}, ', r"a.json is no JSON"),
        ("a.txt", b"one\ntwo caf\xe9\n", r"a.txt, line 2, is not UTF-8 \(byte 0xe9 at 7\)"),
        ("a.txt", b"all of one document\n", r"holds 1 document\(s\) with text; .*data.text_unit=paragraph"),
        ("a.jsonl", b'{"text": ""}\n' * 3, r"holds 0 document\(s\) with text"),
        ("a.parquet", b"no parquet", r"a.parquet can't be read as parquet"),
        ("a.jsonl", GOOD.encode() * 3, r"2 train document\(s\) give not a training sequence of"),
    ],
)  # fmt: skip
def test_a_bad_file_is_named_and_leaves_nothing(tmp_path, tokenizer, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    data = HFText(tokenizer, 64, [str(tmp_path / name)], root=str(tmp_path / "a" / "root"), packing="windows")
    with pytest.raises(Refused, match=words) as refused:
        data.prepare()
    assert len(refused.value.problems) == 1
    assert "\n" not in str(refused.value)
    if "sequence of" not in words:  # whose tokens are kept for another length
        assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("column", "words"),
    [("words", "a.parquet has no key 'text'; it has 'words'"), ("text", "row 2: 'text' is a NoneType")],
)
def test_a_bad_parquet_is_named(tmp_path, tokenizer, column, words):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({column: ["a", None, "b"]}), tmp_path / "a.parquet")
    data = HFText(tokenizer, 64, [str(tmp_path / "a.parquet")], root=str(tmp_path / "root"))
    with pytest.raises(Refused, match=words):
        data.prepare()
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": "x/y"}, "reads either data.files or data.name"),
        ({"sequence_length": 1}, "data.sequence_length=1 predicts nothing; choose 2 or more"),
        ({"test_share": 0.0}, "data.test_share=0.0 is no share"),
        ({"test_share": 1.5}, "data.test_share=1.5 is no share"),
        ({"prompt_key": "q"}, "belong together"),
        ({"files": ["a.txt"], "prompt_key": "q", "response_key": "a"}, "a .txt file has no keys"),
    ],
)
def test_bad_keys_are_refused(tokenizer, given, words):
    with pytest.raises(Refused, match=words):
        HFText(**{"tokenizer": tokenizer, "sequence_length": 8, "files": ["a.jsonl"], **given})


def test_a_plan_needs_no_files_and_a_run_does(tokenizer):
    data = HFText(tokenizer, 8)
    assert data.example(2).inputs.shape == (2, 2, 8)
    with pytest.raises(Refused, match=r"data=hf_text has nothing to read\. Give data\.files="):
        data.prepare()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "nowhere", "data.tokenizer=.*nowhere does not exist"),
        (lambda folder: folder, "data.tokenizer=.* can't be loaded: .*Name a folder that save_pretrained wrote"),
        (lambda folder: None, "data.tokenizer is null, and the model names none"),
    ],
)
def test_a_tokenizer_that_can_not_be_loaded_is_refused(tmp_path, make, words):
    made = make(tmp_path)
    lines = write_lines(tmp_path / "a.jsonl", [{"text": "x"}] * 4)
    data = HFText(None if made is None else str(made), 8, [str(lines)], root=str(tmp_path / "root"))
    with pytest.raises(Refused, match=words) as refused:
        data.prepare()
    assert len(refused.value.problems) == 1
    assert not (tmp_path / "root").exists()


def test_a_data_set_that_is_nowhere_is_refused(tmp_path, tokenizer):
    data = HFText(tokenizer, 8, name=str(tmp_path / "nowhere"), root=str(tmp_path / "root"))
    with pytest.raises(Refused, match=r"data.name=.*nowhere \(data.subset=None, data.split=train\) can't be loaded: "):
        data.prepare()
    assert not (tmp_path / "root").exists()


def test_a_folder_given_as_a_name_is_refused_since_its_changes_would_go_unnoticed(tmp_path, tokenizer):
    write_lines(tmp_path / "a.jsonl", [{"text": "x"}] * 4)
    with pytest.raises(Refused, match=r"data.name=.* is here on the disk. Give data.files="):
        HFText(tokenizer, 8, name=str(tmp_path), root=str(tmp_path / "root"))


def test_packed_documents_are_refused_for_a_model_without_positions(tmp_path, tokenizer):
    command = [
        "model=gpt_tiny",
        "data=hf_text",
        "data.files=[a.jsonl]",
        f"data.tokenizer={tokenizer}",
        "launch.device=cpu",
    ]
    _, [problem] = composed(*command)
    assert problem.startswith("data.packing=documents puts several documents into a sequence")
    assert problem.endswith("Use data.packing=windows or none, or model=hf_causal_lm.")
    for remedy in ("data.packing=windows", "data.packing=none", "model._target_=tests.data.texts.PositionsModel"):
        assert composed(*command, remedy)[1] == []


def test_the_models_vocabulary_is_the_tokenizers_and_can_not_be_less(tokenizer):
    command = [
        "model=gpt_tiny",
        "data=hf_text",
        "data.files=[a.jsonl]",
        f"data.tokenizer={tokenizer}",
        "data.packing=none",
    ]
    config, problems = composed(*command, "launch.device=cpu")
    assert problems == []
    assert config["model"]["vocab_size"] == config["data"]["vocab_size"] == 320
    _, [problem] = composed(*command, "launch.device=cpu", "model.vocab_size=300")
    assert problem.startswith("data.vocab_size=320 tokens are more than model.vocab_size=300")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "data.tokenizer=null",
            "data.tokenizer is null, and the model names none. Give data.tokenizer=<folder or hub name>.",
        ),
        ("data.tokenizer=./nowhere", "data.tokenizer=./nowhere does not exist."),
        ("data.files=[nowhere.jsonl]", "data.files: nowhere.jsonl names no file."),
        ("data.files=[{here}/broken.jsonl]", "{here}/broken.jsonl, line 2 is no JSON:"),
        ("data.packing=some", "data.packing='some' is not one of 'documents' or 'windows' or 'none'."),
    ],
)
def test_the_command_is_refused_in_one_line_before_anything_is_started(tmp_path, tokenizer, override, words):
    here, work = tmp_path / "files", tmp_path / "work"
    here.mkdir()
    work.mkdir()
    (here / "broken.jsonl").write_text(GOOD + "{")
    (here / "good.jsonl").write_text(GOOD * 9)
    outcome = serve(
        work, "model=gpt_tiny", "data=hf_text", f"data.files=[{here}/good.jsonl]", f"data.tokenizer={tokenizer}",
        "data.packing=none", "launch.device=cpu", override.format(here=here),
    )  # fmt: skip
    assert outcome.is_refusal(), outcome.text
    assert [line[: len(words.format(here=here))] for line in outcome.problems] == [words.format(here=here)]
