"""Which words of an earlier run are taken over unseen.

A run folder may be somebody else's, and its list of overrides is a text that anybody could have written. So no word of
it may choose code: whoever resumes types such a word again, and with that vouches for it.
"""

import re
from pathlib import Path

from src.errors import Refused

#: What an override sets: a key, or a group's option. Anything else could be an option of Hydra's command line.
_OVERRIDE = re.compile(r"[+~]{0,2}\w[\w./@-]*(=.*)?", re.DOTALL)
#: A resolver's call, ${oc.decode:...}, can make any text of pieces; ${data.num_classes} only repeats a value.
_RESOLVER = re.compile(r"\$\{[^}]*:")


def refuse_what_chooses_code(words: list[str], run_dir: Path) -> None:
    """Raises Refused, naming each of an earlier run's overrides that could choose what is executed."""
    found = [(word, why) for word in words if (why := _chooses(word))]
    if found:
        raise Refused(
            *(
                f"the run in {run_dir} was given {word!r}, which {why}. No such word is taken over unseen: if you trust"
                " it, type it again."
                for word, why in found
            )
        )


def _chooses(word: str) -> str | None:
    """How a word could choose code; None where it can't."""
    key, _, value = word.partition("=")
    if not _OVERRIDE.fullmatch(word):
        return "is no override"
    if "hydra" in key:
        return "sets Hydra itself"
    if "_target_" in word.replace("\\", ""):
        return "names what to call"
    if _RESOLVER.search(word):
        return "is worked out by a resolver"
    if "." not in key and "../" in value:
        return "reads a file outside conf/"
    return None
