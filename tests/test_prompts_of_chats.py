"""Prompts given as text or as chats: decoded from is what the target's template makes of them."""

import dataclasses

import pytest
from small_models import random_target
from tiny_tokenizer import tiny_tokenizer

from dflash_jax import generate, stream
from dflash_jax.data.chat import render

TOKENIZER = tiny_tokenizer("qwen3")
TARGET = dataclasses.replace(random_target(vocab_size=len(TOKENIZER)), tokenizer=TOKENIZER)
CHAT = [
    {"role": "system", "content": "Answer with a colour."},
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "And another?"},
]


def test_text_is_a_chat_of_one_message():
    as_text, as_chat = generate(TARGET, ["Name a colour.", [CHAT[1]]], max_new_tokens=6)
    assert as_text == as_chat


def test_chats_are_rendered_with_all_their_turns():
    ids = render(TOKENIZER, CHAT, add_generation_prompt=True)
    (from_chat,) = generate(TARGET, [CHAT], max_new_tokens=6)
    assert from_chat == generate(TARGET, [ids], max_new_tokens=6)[0]
    assert from_chat.prompt_length == len(ids)
    assert "".join(stream(TARGET, CHAT, max_new_tokens=6)) == from_chat.text


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "user"}, "'role': 'user'"),
        ("And?", "'And[?]'"),
        (7, "=7 must be a message"),
        ({"role": "user", "content": None}, "content=None must be a string"),
        ({"role": "robot", "content": "Beep."}, "has role 'robot'; allowed are system, user, assistant, tool"),
        ({"role": ["user"], "content": "Hm."}, r"has role \['user'\]; allowed are system, user, assistant"),
    ],
)
def test_what_is_no_message_is_named(message, named):
    with pytest.raises(ValueError, match=rf"^prompts\[1\]\[4\].*{named}"):
        generate(TARGET, ["Hello", [*CHAT, message]], max_new_tokens=6)
