"""data=text: bytes of files as windows of tokens."""

import pytest
import torch

from src.data.text import Text
from src.errors import Refused
from tests.command_server import serve
from tests.data.fetching import CPU, fetch

GIVEN = {"vocab_size": 256, "sequence_length": 8, "suffixes": [".py", ".txt"]}


@pytest.fixture
def folder(tmp_path):
    """Two files, 'b.txt' of 500 bytes after 'a/c.py' of 321, and what is not read."""
    root = tmp_path / "texts"
    (root / "a").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "a" / "c.py").write_bytes(bytes(range(107)) * 3)
    (root / "b.txt").write_bytes(bytes([200]) * 500)
    (root / "picture.png").write_bytes(b"\x89PNG")
    (root / "tests" / "test_c.py").write_bytes(b"assert False")
    return root


def test_samples_are_consecutive_windows_with_the_targets_one_ahead(folder):
    data = Text(**GIVEN, root=str(folder))
    data.prepare()
    train_source, test_source = data.load(CPU, seed=0)
    # 821 bytes: (821 - 1) // 8 = 102 windows; a hundredth of them, 1, is the test set.
    assert (train_source.num_samples, test_source.num_samples) == (101, 1)
    assert train_source.targets_per_sample == 8
    batch = fetch(train_source, [0, 1, 13], num_real=2)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.inputs[:2].tolist() == [list(range(8)), list(range(8, 16))]
    assert batch.targets[:2].tolist() == [list(range(1, 9)), list(range(9, 17))]
    # Window 13 starts at byte 104 of the repeated 0 ... 106.
    assert batch.inputs[2].tolist() == [104, 105, 106, 0, 1, 2, 3, 4]
    assert batch.targets[2].tolist() == [-100] * 8, "padding"


def test_training_and_test_windows_share_no_input(folder):
    data = Text(**GIVEN, root=str(folder))
    train_source, test_source = data.load(CPU, seed=0)
    windows = torch.cat([fetch(source, range(source.num_samples)).inputs for source in (train_source, test_source)])
    whole = (bytes(range(107)) * 3 + bytes([200]) * 500)[: 102 * 8]
    assert bytes(windows.flatten().tolist()) == whole


def test_limit_keeps_the_first_training_windows_and_the_test_set(folder):
    _, whole = Text(**GIVEN, root=str(folder)).load(CPU, seed=0)
    limited, test_source = Text(**GIVEN, root=str(folder), limit=4).load(CPU, seed=0)
    assert limited.num_samples == 4
    assert torch.equal(test_source.tokens, whole.tokens)


def test_one_file_is_text_as_well(folder):
    train_source, test_source = Text(**GIVEN, root=str(folder / "b.txt")).load(CPU, seed=0)
    assert train_source.num_samples + test_source.num_samples == 499 // 8


def test_the_default_is_the_standard_library_in_a_fixed_order_without_its_tests():
    data = Text(**GIVEN)
    data.prepare()
    names = [path.relative_to(data.root).as_posix() for path in data.files()]
    assert names == sorted(names)
    assert {"abc.py", "json/decoder.py", "zipfile.py"} <= set(names) or "zipfile/__init__.py" in names
    assert not [name for name in names if "site-packages" in name or "/test" in name or name.startswith("test")]
    train_source, _ = data.load(CPU, seed=0)
    assert train_source.tokens.dtype == torch.uint8, "a byte a token in memory"
    assert train_source.num_samples > 100_000


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda root: None, "does not exist"),
        (lambda root: root.mkdir(), r"holds no file that ends in \.py or \.txt"),
        (lambda root: (root.mkdir(), (root / "a.txt").write_bytes(b"x" * 16)), "holds 16 bytes; .* need 17"),
    ],
)
def test_too_little_text_is_refused(tmp_path, make, words):
    make(tmp_path / "texts")
    with pytest.raises(Refused, match=words):
        Text(**GIVEN, root=str(tmp_path / "texts")).prepare()


def test_just_enough_text_is_one_window_to_train_on_and_one_to_test(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 17)
    data = Text(**GIVEN, root=str(tmp_path))
    data.prepare()
    assert [source.num_samples for source in data.load(CPU, seed=0)] == [1, 1]


def test_an_empty_folder_is_refused_before_the_start(tmp_path):
    (tmp_path / "empty").mkdir()
    outcome = serve(tmp_path, "model=gpt_tiny", "data.root=empty")
    assert outcome.code == 2
    assert "data.root=empty holds no file" in outcome.stderr
    assert not outcome.run_dirs()


def test_other_than_256_tokens_are_refused_before_the_start(tmp_path):
    outcome = serve(tmp_path, "model=gpt_tiny", "data.vocab_size=512")
    assert outcome.code == 2
    assert "data.vocab_size=512, but data=text reads bytes" in outcome.stderr
