"""The tokenizer of data=hf_text: what identifies it."""

import pytest

from src.data.tokenizer import fingerprint, load_tokenizer
from tests.data.texts import write_tokenizer


@pytest.mark.parametrize("setting", ["truncation", "padding"])
def test_a_fingerprint_is_the_same_before_and_after_use(tmp_path, setting):
    from tokenizers import Tokenizer

    folder = write_tokenizer(tmp_path / "bpe")
    stored = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if setting == "truncation":  # as many tokenizers on the hub are saved
        stored.enable_truncation(max_length=128)
    else:
        stored.enable_padding(length=128)
    stored.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(str(folder))
    assert fingerprint(tokenizer) == fingerprint(tokenizer)
