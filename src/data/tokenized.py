"""Documents as tokens: made once by a process of its own, kept in files, mapped into memory by each rank."""

import ctypes
import json
import multiprocessing
import os
import signal
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from src.data.documents import Document
from src.data.tokenizer import frame
from src.errors import Refused

#: Gives all documents, from the first, each time it is called.
Documents = Callable[[], Iterator[Document]]
DOCUMENTS_A_CALL = 1000  # that the tokenizer is given at once: it shares them out over its threads
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Tokens:
    """Of all documents, one after the other; on disk, so that ranks share one copy in the system's cache.

    tokens: (N,), uint16 or uint32. starts: (documents + 1,), int64, into tokens. prompts: (documents,), int64, tokens
    at a document's beginning that are not learnt. pad: the token that fills what is left of a sequence.
    """

    tokens: npt.NDArray[Any]
    starts: npt.NDArray[np.int64]
    prompts: npt.NDArray[np.int64]
    pad: int

    @classmethod
    def open(cls, folder: Path) -> "Tokens":
        tokens, starts, prompts = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("tokens", "starts", "prompts")
        )
        return cls(tokens, starts, prompts, json.loads((folder / "about.json").read_text())["pad"])


def tokenize_apart(folder: Path, documents: Documents, tokenizer: Any) -> None:
    """Fill `folder` for `Tokens.open`, in a process of its own. Raises Refused.

    The tokenizer starts threads of its own, and ranks are forked from this process: threads don't survive that.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=report, args=(theirs, os.getpid(), folder, documents, tokenizer), daemon=True, name="tokenizing"
    )
    process.start()
    theirs.close()
    try:
        problems = ours.recv()
        process.join()
    except EOFError:
        process.join()
        raise Refused(
            f"tokenising ended without a word (exit code {process.exitcode}): killed, perhaps for its memory."
            " Start again; give smaller files where it happens again."
        ) from None
    finally:
        process.kill()
        process.join()
    if problems:
        raise Refused(*problems)


def report(pipe: Connection, parent: int, folder: Path, documents: Documents, tokenizer: Any) -> None:
    """The process: what went wrong, in lines, or none. It ends with its parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    if os.getppid() != parent:
        return
    try:
        tokenize(folder, documents, tokenizer)
    except Refused as refused:
        pipe.send(refused.problems)
    except OSError as error:
        pipe.send([f"tokenising into {folder.parent} failed: {error}. Make room, or set data.root to another folder."])
    else:
        pipe.send([])


def tokenize(folder: Path, documents: Documents, tokenizer: Any) -> None:
    """Write tokens.npy, starts.npy, prompts.npy and about.json."""
    rest = documents()
    around = frame(tokenizer)
    dtype = np.uint16 if max(tokenizer.get_vocab().values()) < 2**16 else np.uint32
    starts, prompts, raw = array("q", [0]), array("q"), folder / "tokens.raw"
    with raw.open("wb") as file:
        while some := list(islice(rest, DOCUMENTS_A_CALL)):
            before = encode(tokenizer, [document.prompt or "" for document in some])
            after = encode(tokenizer, [document.text for document in some])
            for document, prompt, text in zip(some, before, after, strict=True):
                # Apart from the text, as when the model is asked later: so where the prompt ends is no guess.
                whole = [*around.prefix, *prompt, *text, *around.suffix]
                np.asarray(whole, dtype).tofile(file)
                starts.append(starts[-1] + len(whole))
                prompts.append(0 if document.prompt is None else len(around.prefix) + len(prompt))
    tokens = np.memmap(raw, dtype, "r") if starts[-1] else np.empty(0, dtype)
    np.save(folder / "tokens.npy", tokens)
    raw.unlink()
    np.save(folder / "starts.npy", np.frombuffer(starts, np.int64))
    np.save(folder / "prompts.npy", np.frombuffer(prompts, np.int64) if prompts else np.empty(0, np.int64))
    (folder / "about.json").write_text(json.dumps({"pad": around.pad}))


def encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Each text's tokens, without any that the tokenizer would add."""
    if not any(texts):
        return [[] for _ in texts]
    # verbose: it would warn of texts longer than the model takes, which are cut later.
    found: list[list[int]] = tokenizer(texts, add_special_tokens=False, truncation=False, padding=False, verbose=False)[
        "input_ids"
    ]
    return found
