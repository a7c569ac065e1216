"""The tokenizer of data=hf_text: loaded through transformers, from a folder or the hub."""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from src.errors import Refused, in_words


class Frame(NamedTuple):
    """What stands around each document. prefix: as the tokenizer itself begins a text. suffix: its end-of-text token.

    pad: fills what is left of a sequence; its targets are masked, so any token does.
    """

    prefix: list[int]
    suffix: list[int]
    pad: int


@lru_cache(maxsize=4)
def load_tokenizer(name: str | None) -> Any:
    """A fast tokenizer of transformers. name: a folder, or a name of the hub. Raises Refused."""
    if name is None:
        raise Refused("data.tokenizer is null, and the model names none. Give data.tokenizer=<folder or hub name>.")
    folder = Path(name).expanduser()
    if not folder.exists() and (name.count("/") > 1 or name.startswith(("/", ".", "~"))):
        raise Refused(f"data.tokenizer={name} does not exist. Name a folder that save_pretrained wrote, or a hub name.")
    from transformers import AutoTokenizer  # 2 s to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder) if folder.exists() else name)
    except Exception as error:  # whatever transformers and the hub raise: OSError, ValueError, KeyError ...
        raise Refused(
            f"data.tokenizer={name} can't be loaded: {in_words(error)} Name a folder that save_pretrained wrote, or a"
            " hub name that this machine can reach."
        ) from error
    if not tokenizer.is_fast:
        raise Refused(
            f"data.tokenizer={name} is a {type(tokenizer).__name__} without a fast form (tokenizer.json)."
            " Use a fast tokenizer."
        )
    return tokenizer


def vocabulary(name: str | None) -> int:
    """One more than the largest token: what a model's embedding must hold. Gaps count, added tokens too."""
    return 1 + max(int(token) for token in load_tokenizer(name).get_vocab().values())


def frame(tokenizer: Any) -> Frame:
    """What the tokenizer puts before a text by itself, and its end-of-text token, where it has one."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a", add_special_tokens=True)["input_ids"]
    places = [i for i in range(len(whole)) if whole[i : i + len(bare)] == bare]
    prefix = whole[: places[0]] if places else []
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    choices = [token for token in (pad, end, 0) if token is not None]
    return Frame(list(prefix), [] if end is None else [int(end)], int(choices[0]))


def fingerprint(tokenizer: Any) -> str:
    """The same for tokenizers that make the same tokens of a text, wherever their files lie."""
    around = frame(tokenizer)  # before its state is taken: its first use resets truncation and padding
    digest = hashlib.blake2b(tokenizer.backend_tokenizer.to_str().encode(), digest_size=16)
    digest.update(repr(around).encode())
    return digest.hexdigest()
