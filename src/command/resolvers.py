"""What ${...} in conf/ can call."""

import uuid

from omegaconf import OmegaConf


def register() -> None:
    """unique: six random characters. vocabulary: the number of tokens of a tokenizer, by its folder or hub name."""
    # Cached, so that the parent fixes one folder for a run; random, so that two runs of one second differ.
    OmegaConf.register_new_resolver("unique", lambda: uuid.uuid4().hex[:6], use_cache=True, replace=True)
    OmegaConf.register_new_resolver("vocabulary", vocabulary, replace=True)


def vocabulary(tokenizer: str | None) -> int:
    """Raises Refused."""
    from src.data import tokenizer as tokenizers  # torch and transformers, which a command without it does not pay for

    return tokenizers.vocabulary(tokenizer)
