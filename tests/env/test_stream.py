"""The order of prompts: each once per epoch, by position, the same in every process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerogap.env.stream import PromptStream


@given(length=st.integers(1, 60), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000))
def test_every_epoch_has_every_prompt_once(length, seed, epoch):
    stream = PromptStream(length, seed)
    assert sorted(stream[epoch * length + i] for i in range(length)) == list(range(length))


@given(positions=st.lists(st.integers(0, 400), max_size=60))
def test_access_is_random_access(positions):
    """A resumed run starts at a position; asynchronous readers go back and forth over an epoch's border."""
    straight = PromptStream(37, 5)
    order = [straight[i] for i in range(401)]
    stream = PromptStream(37, 5)
    assert [stream[p] for p in positions] == [order[p] for p in positions]


def test_epochs_and_seeds_have_their_own_order():
    one, other = PromptStream(100, 0), PromptStream(100, 1)
    first = [one[i] for i in range(100)]
    assert first != [one[100 + i] for i in range(100)]
    assert first != [other[i] for i in range(100)]
    assert first != sorted(first)


def test_the_order_is_pinned():
    """A change of order would silently break --resume of older runs."""
    stream = PromptStream(10, 0)
    assert [stream[i] for i in range(12)] == [1, 7, 0, 4, 9, 2, 6, 3, 5, 8, 7, 8]


def test_bad_arguments():
    with pytest.raises(ValueError, match="length 0"):
        PromptStream(0, 0)
    with pytest.raises(IndexError, match="-1"):
        PromptStream(3, 0)[-1]
