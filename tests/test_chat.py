"""Chats to token ids: serving prompts, loss masks without generation markers, one BOS, templates that are unsafe."""

import functools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer
from tokenizers import AddedToken, pre_tokenizers

from dflash_jax.data import turns
from dflash_jax.data.chat import render
from dflash_jax.data.chat_template import ChatTemplateError
from dflash_jax.data.turns import TurnRenderer, training_rows

FAMILIES = ["smollm2", "qwen2_5", "qwen3", "llama3"]
END_OF_TURN = {"smollm2": "<|im_end|>", "qwen2_5": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>"}
DATE = {"date_string": "26 Jul 2024"}


def _chat(*contents: str) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def _decode(tokenizer, tokens) -> str:
    return tokenizer.decode([int(t) for t in tokens], skip_special_tokens=False)


def render_training(tokenizer, messages, **options):
    """Tokens and mask of a chat that gives one row."""
    (row,) = training_rows(tokenizer, messages, **options)
    return row.tokens, row.loss_mask


TWO_TURNS = _chat("Name a colour.", "Blue.", "And another?", "Red: naïve 🎈.")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("system", [False, True])
def test_mask_is_the_answers_with_their_ends_of_turn(family, system):
    tokenizer = tiny_tokenizer(family)
    messages = [{"role": "system", "content": "Be brief."}] * system + TWO_TURNS
    tokens, mask = render_training(tokenizer, messages)
    end = END_OF_TURN[family]
    assert _decode(tokenizer, tokens[mask]) == f"Blue.{end}Red: naïve 🎈.{end}"
    assert tokens.dtype == "int32" and mask.dtype == bool and tokens.shape == mask.shape


@pytest.mark.parametrize("family", FAMILIES)
def test_newline_after_the_end_of_turn_is_not_supervised(family):
    tokenizer = tiny_tokenizer(family)
    tokens, mask = render_training(tokenizer, TWO_TURNS)
    after = _decode(tokenizer, tokens[mask.nonzero()[0][-1] + 1 :])
    assert after == ("" if family == "llama3" else "\n")


# Qwen 3 writes an empty think block into the prompt and out of the past: then every answer has its own row.
ARGUMENTS = [("smollm2", {}), ("qwen2_5", {}), ("qwen3", {}), ("qwen3", {"enable_thinking": False}), ("llama3", DATE)]
SEAMS = ["Red.", "\nRed.\n\nBlue", "assistant", "system\n", " you?", "<", "x", "\n\n ", "<|im_end|>", "🎈"]


@pytest.mark.parametrize(("family", "arguments"), ARGUMENTS)
@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.one_of(st.sampled_from(SEAMS), st.text(max_size=12)), min_size=2, max_size=6),
    system=st.sampled_from(["", "Be brief."]),
)
def test_every_answer_is_trained_as_it_is_served(family, arguments, texts, system):
    texts = [text if text.strip() else "x" for text in texts][: len(texts) // 2 * 2]
    tokenizer = tokenizer_of(family)
    messages = [{"role": "system", "content": system}] * bool(system) + _chat(*texts)
    rows = training_rows(tokenizer, messages, template_arguments=arguments)
    supervised = 0
    for i in range(len(messages) - len(texts) + 1, len(messages), 2):
        prompt = render(tokenizer, messages[:i], add_generation_prompt=True, template_arguments=arguments)
        # Llama 3 trims contents and Qwen 3 strips newlines before the last answer, which is then what the row says.
        strip = {"llama3": str.strip, "qwen3": lambda text: text.lstrip("\n") or text}.get(family, str)
        forms = [form + END_OF_TURN[family] for form in (strip(messages[i]["content"]), messages[i]["content"])]
        answers = [tokenizer.encode(form, add_special_tokens=False) for form in forms]
        # Without a thinking argument Qwen 3 puts an empty think block between the prompt and the last answer.
        between = len(tokenizer.encode("<think>\n\n</think>\n\n", add_special_tokens=False))
        found = [
            answer
            for row in rows
            for answer in answers
            for skip in ([0] if row.as_served else [0, between])
            if row.tokens[: len(prompt)].tolist() == prompt
            and row.tokens[len(prompt) + skip :][: len(answer)].tolist() == answer
            and row.loss_mask[len(prompt) + skip :][: len(answer)].all()
        ]
        assert found, (messages, i)
        supervised += len(found[0])
    assert rows[-1].as_served == (family != "qwen3" or bool(arguments))
    assert family == "qwen3" or all(row.as_served for row in rows)
    assert sum(int(row.loss_mask.sum()) for row in rows) == supervised


@functools.cache
def tokenizer_of(family):
    return tiny_tokenizer(family)


def test_rows_of_a_chat_follow_what_the_template_does_to_the_past():
    tokenizer = tiny_tokenizer("qwen3")
    reasoned = _chat("One?", "<think>\nHm.\n</think>\n\nBlue.", "Two?", "<think>\nOh.\n</think>\n\nRed.")
    plain = {True: 1, False: 2}  # rows by enable_thinking: without thinking, the past lacks the empty think block
    for thinking, rows in plain.items():
        assert len(training_rows(tokenizer, TWO_TURNS, template_arguments={"enable_thinking": thinking})) == rows
    first, second = training_rows(tokenizer, reasoned)
    assert _decode(tokenizer, first.tokens[first.loss_mask]) == "<think>\nHm.\n</think>\n\nBlue.<|im_end|>"
    assert _decode(tokenizer, second.tokens[second.loss_mask]) == "<think>\nOh.\n</think>\n\nRed.<|im_end|>"
    assert "Hm." not in _decode(tokenizer, second.tokens) and first.as_served and second.as_served


def test_many_chats_tokenised_together_are_those_tokenised_alone():
    tokenizer = tiny_tokenizer("llama3")
    chats = [TWO_TURNS, TWO_TURNS[:2], _chat("🎈", "Red."), TWO_TURNS]
    renderer = TurnRenderer(tokenizer, template_arguments=DATE)
    together = renderer.tokenise([renderer.render(messages) for messages in chats])
    for rows, messages in zip(together, chats, strict=True):
        alone = training_rows(tokenizer, messages, template_arguments=DATE)
        assert [row.tokens.tolist() for row in rows] == [row.tokens.tolist() for row in alone]
        assert [row.loss_mask.tolist() for row in rows] == [row.loss_mask.tolist() for row in alone]


@pytest.mark.parametrize(
    ("refusal", "arguments"),
    [("messages | length == 3", {}), ("messages[0].content == 'Two?'", {}), ("false", {"conversations": 1})],
)
def test_chats_rendered_together_give_the_rows_and_errors_of_those_rendered_alone(refusal, arguments):
    tokenizer = tiny_tokenizer("qwen2_5")
    refused = f"{{% if {refusal} %}}{{{{ raise_exception('refused') }}}}{{% endif %}}"
    tokenizer.chat_template = refused + tokenizer.chat_template
    chats = [_chat("One?", "1."), TWO_TURNS, _chat("Two?", "2."), TWO_TURNS[:3], []]
    renderer = TurnRenderer(tokenizer, template_arguments=arguments)
    together, failed = renderer.rows_of(chats), 0
    for messages, rows in zip(chats, together, strict=True):
        if isinstance(rows, ValueError):
            failed += 1
            with pytest.raises(type(rows), match=f"^{re.escape(str(rows))}$"):
                renderer.render(messages)
        else:
            (alone,) = renderer.tokenise([renderer.render(messages)])
            assert [row.tokens.tolist() for row in rows] == [row.tokens.tolist() for row in alone]
    assert failed == (5 if arguments else 3)


@pytest.mark.parametrize(("clock", "most"), [("", 2), ("{% set today = strftime_now('%d') %}", 1)])
def test_a_template_that_asks_for_the_time_renders_prompt_and_answer_together(monkeypatch, clock, most):
    tokenizer, rendered, right = tiny_tokenizer("qwen2_5"), [], turns.render_texts

    def counted(tokenizer, conversations, **options):
        rendered.append(len(conversations))
        return right(tokenizer, conversations, **options)

    monkeypatch.setattr(turns, "render_texts", counted)
    tokenizer.chat_template = clock + tokenizer.chat_template
    TurnRenderer(tokenizer).rows_of([_chat("One?", "1."), _chat("Two?", "2.")])
    assert set(rendered) == {most}


def test_what_a_tokenizers_file_says_of_truncation_and_padding_does_not_touch_rows():
    wanted = training_rows(tokenizer_of("qwen2_5"), TWO_TURNS)
    tokenizer = tiny_tokenizer("qwen2_5")
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=7)
    (row,) = training_rows(tokenizer, TWO_TURNS)
    assert row.tokens.tolist() == wanted[0].tokens.tolist()


MARKS = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|begin_of_text|>", "<think>", "<|", "|>", "<think", " "]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.lists(st.sampled_from([*SEAMS, *MARKS]) | st.text(max_size=5)).map("".join), max_size=5))
def test_texts_in_pieces_are_tokenised_as_whole_ones(family, texts):
    tokenizer = tokenizer_of(family)
    renderer = TurnRenderer(tokenizer)
    assert renderer._seams is not None
    assert list(renderer._encode(texts)) == [tokenizer.encode(text, add_special_tokens=False) for text in texts]


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized"])
def test_texts_stay_whole_where_a_token_looks_at_what_surrounds_it(flag):
    tokenizer = tiny_tokenizer("qwen2_5")
    tokenizer.add_tokens([AddedToken("<mark>", normalized=False)])
    assert TurnRenderer(tokenizer)._seams is not None
    tokenizer.add_tokens([AddedToken("<other>", **{"normalized": False, flag: True})])
    renderer, texts = TurnRenderer(tokenizer), ["a <other> b", "a<other>b<other> <mark> c"]
    assert renderer._seams is None
    assert list(renderer._encode(texts)) == [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    as_text = tiny_tokenizer("qwen2_5")
    as_text.backend_tokenizer.encode_special_tokens = True
    assert TurnRenderer(as_text)._seams is None
    llama2 = tiny_tokenizer("qwen2_5")
    llama2.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    assert TurnRenderer(llama2)._seams is None


def test_qwen3_own_reasoning_is_supervised_and_an_empty_think_block_is_not():
    tokenizer = tiny_tokenizer("qwen3")
    tokens, mask = render_training(tokenizer, _chat("Name a colour.", "<think>\nHm.\n</think>\n\nBlue."))
    assert _decode(tokenizer, tokens[mask]) == "<think>\nHm.\n</think>\n\nBlue.<|im_end|>"
    separate = [TWO_TURNS[0], {"role": "assistant", "content": "Blue.", "reasoning_content": "Hm."}]
    assert render_training(tokenizer, separate)[0].tolist() == tokens.tolist()
    assert render_training(tokenizer, separate)[1].tolist() == mask.tolist()
    tokens, mask = render_training(tokenizer, _chat("Name a colour.", "Blue."))
    assert "<think>\n\n</think>" in _decode(tokenizer, tokens)
    assert _decode(tokenizer, tokens[mask]) == "Blue.<|im_end|>"


def test_template_arguments_reach_the_template():
    tokenizer = tiny_tokenizer("qwen3")

    def prompt(**arguments):
        ids = render(tokenizer, TWO_TURNS[:1], add_generation_prompt=True, template_arguments=arguments)
        return _decode(tokenizer, ids)

    assert prompt().endswith("<|im_start|>assistant\n")
    assert prompt(enable_thinking=False).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    with pytest.raises(ChatTemplateError, match="tokenize"):
        prompt(tokenize=True)


@pytest.mark.parametrize("written_by_template", [0, 1, 2])
def test_exactly_one_bos(written_by_template):
    tokenizer = tiny_tokenizer("llama3")
    body = tokenizer.chat_template.replace("{{- bos_token }}", "", 1)
    tokenizer.chat_template = "{{- bos_token }}" * written_by_template + body
    ids = render(tokenizer, TWO_TURNS[:1], add_generation_prompt=True, template_arguments=DATE)
    tokens, mask = render_training(tokenizer, TWO_TURNS, template_arguments=DATE)
    assert ids[0] == tokens[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == tokens.tolist().count(tokenizer.bos_token_id) == 1
    assert _decode(tokenizer, tokens[mask]) == "Blue.<|eot_id|>Red: naïve 🎈.<|eot_id|>"


def test_no_bos_where_the_tokenizer_adds_none():
    for family in ("qwen3", "smollm2"):
        tokenizer = tiny_tokenizer(family)
        ids = render(tokenizer, TWO_TURNS[:1], add_generation_prompt=True)
        assert _decode(tokenizer, ids[:3]).startswith("<|im_start|>" + ("user" if family == "qwen3" else "sys")[:1])


def test_template_without_assistant_text_is_named():
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    tokenizer = tiny_tokenizer("qwen3", template)
    with pytest.raises(ChatTemplateError, match=r"'tiny-qwen3' .*for m in messages.* renders no assistant text"):
        render_training(tokenizer, TWO_TURNS)


def test_template_without_end_of_turn_supervises_the_content_alone():
    tokenizer = tiny_tokenizer("qwen3", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}")
    tokens, mask = render_training(tokenizer, TWO_TURNS[:2])
    assert _decode(tokenizer, tokens[mask]) == "Blue."


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ messages['__class__'] }}",
        "{{ messages | attr('__class__') }}",
        "{% if messages[0].content.__class__ %}x{% endif %}",
        "{% generation %}{{ ().__class__.__mro__[1].__subclasses__() }}{% endgeneration %}",
        "{{ cycler._private }}",
        "{{ ('__cla' ~ 'ss__') and ''['__cla' ~ 'ss__'].mro() }}",  # only at run time, stopped by the sandbox
        "{{ messages.append('x') }}",
    ],
)
def test_unsafe_template_is_refused(template):
    tokenizer = tiny_tokenizer("qwen3", template)
    with pytest.raises(ChatTemplateError, match="tiny-qwen3"):
        render(tokenizer, TWO_TURNS[:1], add_generation_prompt=True)


def test_generation_markers_and_comments_on_internals_are_harmless():
    marked = (
        "{# no __class__ here #}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    tokenizer = tiny_tokenizer("qwen3", marked)
    assert _decode(tokenizer, render(tokenizer, TWO_TURNS[:1], add_generation_prompt=False)) == "Name a colour."


@pytest.mark.parametrize("template", ["{% if %}", "{{ raise_exception('roles must alternate') }}", "{{ 1 + 'a' }}"])
def test_failing_template_is_a_named_error(template):
    tokenizer = tiny_tokenizer("qwen3", template)
    with pytest.raises(ChatTemplateError, match="tiny-qwen3"):
        render(tokenizer, TWO_TURNS[:1], add_generation_prompt=True)


def test_missing_template_says_what_to_do():
    tokenizer = tiny_tokenizer("qwen3", "")
    with pytest.raises(ChatTemplateError, match="no chat template; use an instruction-tuned target"):
        render(tokenizer, TWO_TURNS[:1], add_generation_prompt=True)


def test_ids_beyond_the_embedding_are_named():
    tokenizer = tiny_tokenizer("qwen2_5")
    largest = tokenizer.convert_tokens_to_ids("<|im_end|>")
    render(tokenizer, TWO_TURNS[:1], add_generation_prompt=True, embedding_rows=largest + 1)
    with pytest.raises(ValueError, match=rf"token id {largest} \('<\|im_end\|>'\).* {largest} rows"):
        render(tokenizer, TWO_TURNS[:1], add_generation_prompt=True, embedding_rows=largest)


def test_chat_to_train_on_ends_with_an_answer():
    with pytest.raises(ValueError, match="must end with an assistant message, not with role 'user'"):
        render_training(tiny_tokenizer("qwen3"), TWO_TURNS[:3])
