"""Streaming: the pieces join to the text of `generate`, and no piece splits a character."""

import gc
import threading
import time

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import random_target, rigged, script, scripted

from dflash_jax.decoding.generate import generate, stream
from dflash_jax.decoding.streaming import Stream, _decoded

# One, two, three and four bytes a character, a combining accent, a joined emoji, and a character Unicode reserves
# for bytes that are none, written out by the model itself.
TEXT = "naïve e\u0301 Ωμέγα 日本語 🎉👩‍🚀 \ufffd! end"
PROMPT = list(b"Say: ")
STOP = 0


class ByteTokenizer:
    """Tokens are bytes; 0 is special."""

    def decode(self, tokens, skip_special_tokens=False) -> str:
        return bytes(token for token in tokens if token != STOP).decode("utf-8", errors="replace")


def spoken(text: str = TEXT):
    """A target that says the text and stops, and the script it follows."""
    rows = script([PROMPT], [[*text.encode(), STOP]])
    return scripted(rows, 256, tokenizer=ByteTokenizer(), stop_token_ids=(STOP,)), rows


@pytest.mark.parametrize("right", [None, 0, 1, 2, 4, 7])
def test_pieces_join_to_the_text_and_are_whole_characters(right):
    target, rows = spoken()
    drafter = None if right is None else rigged(rows, right, width=8, vocab_size=256)
    pieces = list(stream(target, PROMPT, drafter=drafter, max_new_tokens=200))
    (whole,) = generate(target, [PROMPT], drafter=drafter, max_new_tokens=200)
    assert "".join(pieces) == whole.text == TEXT
    assert all(pieces)
    # the only replacement character is the one the text holds
    assert sum(piece.count("\ufffd") for piece in pieces) == 1


def test_text_comes_as_soon_as_its_round_is_done():
    target, rows = spoken("abcdefghij")
    assert list(stream(target, PROMPT, max_new_tokens=200)) == list("abcdefghij")
    drafter = rigged(rows, 2, width=8, vocab_size=256)
    assert list(stream(target, PROMPT, drafter=drafter, max_new_tokens=200)) == ["a", "bcd", "efg", "hij"]


@given(st.lists(st.lists(st.one_of(st.integers(1, 255), st.sampled_from("aé€🎉".encode())), max_size=4), max_size=12))
def test_any_bytes_in_any_rounds_give_the_text_of_all_of_them(rounds):
    """Also those that are no text."""
    ends = [(tokens, number == len(rounds)) for number, tokens in enumerate(rounds, start=1)]
    every = [token for tokens in rounds for token in tokens]
    assert "".join(_decoded(ByteTokenizer(), iter(ends))) == ByteTokenizer().decode(every)


def test_a_long_text_is_not_decoded_again_and_again():
    asked = []

    class Counting(ByteTokenizer):
        def decode(self, tokens, skip_special_tokens=False) -> str:
            asked.append(len(tokens))
            return super().decode(tokens)

    rounds = [(list("日本".encode()[start : start + 2]), False) for start in (0, 2, 4)] * 100
    assert "".join(_decoded(Counting(), iter(rounds))) == "日本" * 100
    assert max(asked) <= 12


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 5, 40])
def test_a_budget_that_cuts_a_character_gives_what_generate_gives(budget):
    target, _ = spoken("日本語")
    pieces = list(stream(target, PROMPT, max_new_tokens=budget))
    assert "".join(pieces) == generate(target, [PROMPT], max_new_tokens=budget)[0].text


def test_an_abandoned_stream_frees_its_caches_and_its_thread():
    """At once, not when a collector comes by, which does not know of a device's memory."""
    target, rows = spoken()
    drafter = rigged(rows, 2, width=8, vocab_size=256)

    def left_open() -> Stream:
        pieces = stream(target, PROMPT, drafter=drafter, width="adaptive", max_new_tokens=200)
        assert next(pieces) + next(pieces)
        return pieces

    left_open()
    gc.collect()
    threads, arrays = threading.active_count(), len(jax.live_arrays())
    still_open = left_open()
    held = len(jax.live_arrays()) - arrays
    assert held > 10
    del still_open
    gc.disable()
    try:
        for _ in range(3):
            left_open()
        closed = left_open()
        closed.close()
        assert list(closed) == [] and closed.stats is None
        assert len(jax.live_arrays()) < arrays + held  # some constants of JAX may have come; no stream is left
    finally:
        gc.enable()
    until = time.monotonic() + 10  # a thread needs a moment to end
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= threads


def test_options_are_those_of_generate():
    target, _ = spoken("abcdefghij")
    assert "".join(stream(target, PROMPT, max_new_tokens=200, stop_token_ids=[ord("d")])) == "abcd"
    assert "".join(stream(target, np.array(PROMPT), max_new_tokens=3, temperature=0.01, seed=4)) == "abc"


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, r"prompts\[0\] is empty"),
        ([300], {}, "token id 300"),
        (PROMPT, {"max_new_tokens": -1}, "max_new_tokens=-1"),
        (PROMPT, {"batch_size": 2}, "stream takes no batch_size"),
        (PROMPT, {"width": 3}, "width=3"),
        (["a", "b"], {}, "^prompt is a list with a str in it: stream takes one prompt"),
        ([PROMPT, PROMPT], {}, "^prompt is a list with a list in it: stream takes one prompt"),
        (PROMPT, {"stop_token_ids": [256]}, "stop_token_ids holds 256"),
    ],
)
def test_errors_name_the_argument(prompt, options, message):
    with pytest.raises(ValueError, match=message):
        next(stream(spoken()[0], prompt, **options))


def test_a_target_without_tokenizer_can_not_stream():
    with pytest.raises(ValueError, match="a random target has no tokenizer"):
        next(stream(random_target(num_layers=1), [1]))
