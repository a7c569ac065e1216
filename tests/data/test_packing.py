"""Packing: arithmetic on lengths that must hold for all of them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from src.batch import IGNORED
from src.data.packed import DocumentsSource, RowWindowsSource
from src.data.packing import best_fit, documents_packed, ranges, single_documents, split, windows
from src.data.tokenized import Tokens

PAD = 60_000
#: Lengths of documents, and how many of each one's tokens are its prompt.
DOCUMENTS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 45)), min_size=1, max_size=30)


def made_of(documents):
    """Tokens 0, 1, 2 ... over all documents, so that each says where it is from."""
    lengths = [length for length, _ in documents]
    starts = np.cumsum([0, *lengths])
    prompts = np.array([min(prompt, length) for length, prompt in documents])
    return Tokens(np.arange(starts[-1], dtype=np.uint16), starts, prompts, PAD)


def all_of(source):
    inputs, targets = source.gather(np.arange(source.num_samples))
    return inputs, targets


def chosen(tokens, every=1):
    """Every so many of the documents, as a split may leave them."""
    return np.arange(0, len(tokens.prompts), every)


@given(DOCUMENTS, st.integers(2, 16), st.integers(1, 3))
def test_packed_documents_are_whole_learnt_once_and_apart(documents, sequence_length, every):
    tokens = made_of(documents)
    kept = chosen(tokens, every)
    samples = documents_packed(tokens.starts, kept, sequence_length)
    source = DocumentsSource(tokens, samples, sequence_length, torch.device("cpu"), with_positions=True)
    inputs, targets = all_of(source)
    rows, positions = inputs[:, 0], inputs[:, 1]
    real = rows != PAD
    # Every token of every document, once.
    ids = [t for d in kept for t in range(tokens.starts[d], tokens.starts[d + 1])]
    assert sorted(rows[real].tolist()) == ids
    # Positions restart with each piece, whose tokens are consecutive ones of one document.
    begins = positions == 0
    assert begins[:, 0].all()
    owner = np.searchsorted(tokens.starts, np.arange(len(tokens.tokens)), "right") - 1
    for row, places, begin in zip(rows.tolist(), positions.tolist(), begins.tolist(), strict=True):
        for i in range(1, sequence_length):
            if begin[i]:
                continue
            assert places[i] == places[i - 1] + 1
            assert row[i] == PAD == row[i - 1] or (row[i] == row[i - 1] + 1 and owner[row[i]] == owner[row[i] - 1])
    # A target is the next token of the same document; each is learnt once, but for prompts and first tokens.
    learnt = targets != IGNORED
    assert (targets[learnt] == rows[learnt] + 1).all()
    assert not learnt[~real].any()
    expected = [t for d in kept for t in range(tokens.starts[d] + max(1, tokens.prompts[d]), tokens.starts[d + 1])]
    assert sorted(targets[learnt].tolist()) == expected


@given(DOCUMENTS, st.integers(2, 16), st.integers(1, 3))
def test_windows_are_the_row_of_documents_cut(documents, sequence_length, every):
    tokens = made_of(documents)
    kept = chosen(tokens, every)
    row = [t for d in kept for t in range(tokens.starts[d], tokens.starts[d + 1])]
    prompt = {t for d in kept for t in range(tokens.starts[d], tokens.starts[d] + tokens.prompts[d])}
    source = RowWindowsSource(
        tokens, windows(tokens.starts, kept, sequence_length), sequence_length, torch.device("cpu")
    )
    assert source.num_samples == (len(row) - 1) // sequence_length
    inputs, targets = all_of(source)
    count = source.num_samples * sequence_length
    assert inputs.flatten().tolist() == row[:count]
    assert targets.flatten().tolist() == [IGNORED if t in prompt else t for t in row[1 : count + 1]]


@given(DOCUMENTS, st.integers(2, 16))
def test_single_documents_are_padded_or_cut(documents, sequence_length):
    tokens = made_of(documents)
    samples = single_documents(tokens.starts, chosen(tokens), sequence_length)
    inputs, targets = all_of(DocumentsSource(tokens, samples, sequence_length, torch.device("cpu"), False))
    assert inputs.shape == (len(documents), sequence_length)
    for d, (row, learnt) in enumerate(zip(inputs.tolist(), targets.tolist(), strict=True)):
        whole = list(range(tokens.starts[d], tokens.starts[d + 1]))
        labels = [IGNORED if t < tokens.starts[d] + tokens.prompts[d] else t for t in whole]
        padding = sequence_length + 1 - len(whole)
        assert row == [*whole, *[PAD] * padding][:sequence_length]
        assert learnt == [*labels, *[IGNORED] * padding][1 : sequence_length + 1]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_best_fit_never_overfills_and_never_opens_a_sequence_where_another_has_room(lengths):
    sequence, place = best_fit(np.array(lengths), 20)
    used = np.bincount(sequence, weights=lengths)
    assert used.max() <= 20
    assert (used > 0).all(), "numbered without gaps"
    for number in range(len(used)):
        pieces = sorted((place[i], lengths[i]) for i in np.flatnonzero(sequence == number))
        assert [begin for begin, _ in pieces] == np.cumsum([0, *(size for _, size in pieces)])[:-1].tolist()
    # Two half-empty sequences would fit into one another.
    assert (used <= 10).sum() <= 1
    firsts = [int(np.flatnonzero(sequence == number)[0]) for number in range(len(used))]
    assert firsts == sorted(firsts), "numbered by first piece"


@given(st.integers(2, 500), st.floats(0.001, 0.999), st.integers(0, 5))
def test_each_document_is_trained_on_or_tested_and_both_have_one(count, share, seed):
    train, test = split(count, share, seed)
    assert sorted([*train, *test]) == list(range(count))
    assert len(train) >= 1
    assert len(test) == min(max(1, round(count * share)), count - 1)


def test_another_seed_tests_on_other_documents():
    assert split(1000, 0.1, 0)[1].tolist() == split(1000, 0.1, 0)[1].tolist()
    assert split(1000, 0.1, 0)[1].tolist() != split(1000, 0.1, 1)[1].tolist()


def test_ranges_follow_one_another():
    assert ranges(np.array([5, 9, 2]), np.array([2, 0, 3])).tolist() == [5, 6, 2, 3, 4]


def test_packing_a_hundred_thousand_documents_leaves_little_padding():
    lengths = np.random.default_rng(0).integers(20, 2000, 100_000)
    starts = np.cumsum([0, *lengths])
    samples = documents_packed(starts, np.arange(len(lengths)), 1024)
    assert lengths.sum() / (len(samples) * 1024) > 0.99


@pytest.mark.parametrize("positions", [True, False])
def test_gathering_some_ids_equals_gathering_all(positions):
    tokens = made_of([(7, 2), (3, 0), (20, 4), (5, 5), (11, 0)])
    pack = documents_packed if positions else single_documents
    source = DocumentsSource(tokens, pack(tokens.starts, chosen(tokens), 8), 8, torch.device("cpu"), positions)
    inputs, targets = all_of(source)
    ids = np.array([3, 0, 3, source.num_samples - 1])
    some_inputs, some_targets = source.gather(ids)
    assert (some_inputs == inputs[ids]).all()
    assert (some_targets == targets[ids]).all()
