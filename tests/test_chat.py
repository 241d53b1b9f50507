"""Chats to token ids: serving prompts, loss masks without generation markers, one BOS, templates that are unsafe."""

import pytest
from tiny_tokenizer import tiny_tokenizer

from dflash_jax.data.chat import render, render_training
from dflash_jax.data.chat_template import ChatTemplateError

FAMILIES = ["smollm2", "qwen2_5", "qwen3", "llama3"]
END_OF_TURN = {"smollm2": "<|im_end|>", "qwen2_5": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>"}
DATE = {"date_string": "26 Jul 2024"}


def _chat(*contents: str) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def _decode(tokenizer, tokens) -> str:
    return tokenizer.decode([int(t) for t in tokens], skip_special_tokens=False)


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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("answer", ["Red.", "\nRed.\n\nBlue", "assistant", "system\n", " you?", "<", "x"])
def test_training_row_is_serving_prompt_plus_generated_tokens(family, answer):
    tokenizer = tiny_tokenizer(family)
    arguments = {"enable_thinking": False} if family == "qwen3" else DATE
    messages = [*TWO_TURNS[:3], {"role": "assistant", "content": answer}]
    prompt = render(tokenizer, messages[:-1], add_generation_prompt=True, template_arguments=arguments)
    tokens, mask = render_training(tokenizer, messages, template_arguments=arguments)
    assert tokens[: len(prompt)].tolist() == prompt
    supervised = tokens[len(prompt) :][mask[len(prompt) :]].tolist()
    # Llama 3 trims contents and Qwen 3 strips leading newlines, which is then what the row says.
    shown = {"llama3": answer.strip(), "qwen3": answer.lstrip("\n")}.get(family, answer)
    assert supervised == tokenizer.encode(shown + END_OF_TURN[family], add_special_tokens=False)


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


def test_qwen3_reasoning_of_earlier_turns_is_dropped_by_the_template():
    tokenizer = tiny_tokenizer("qwen3")
    tokens, mask = render_training(tokenizer, _chat("One?", "<think>\nHm.\n</think>\n\nBlue.", "Two?", "Red."))
    assert _decode(tokenizer, tokens[mask]) == "Blue.<|im_end|>Red.<|im_end|>"


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
    with pytest.raises(ValueError, match=f"{largest} rows"):
        render_training(tokenizer, TWO_TURNS, embedding_rows=largest)


def test_chat_to_train_on_ends_with_an_answer():
    with pytest.raises(ValueError, match="must end with an assistant message, not with role 'user'"):
        render_training(tiny_tokenizer("qwen3"), TWO_TURNS[:3])
