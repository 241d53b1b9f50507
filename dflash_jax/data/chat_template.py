"""Renders a conversation to text by the chat template of a checkpoint, which is foreign code and treated as such.

transformers runs templates in jinja's immutable sandbox. The sandbox turns most forbidden look-ups into an empty string
without a word, so that a template probing for `__class__` would merely render something else; here it is an error.
"""

import functools
import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class ChatTemplateError(ValueError):
    """A chat template is missing, unsafe, or does not render the conversation."""


class _GenerationTag(jinja2.ext.Extension):
    """Lets `{% generation %}` blocks, which transformers adds to jinja, be parsed."""

    tags = {"generation"}  # noqa: RUF012  (jinja reads a plain set)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_PARSER = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=[_GenerationTag, jinja2.ext.loopcontrols])


def describe(tokenizer) -> str:
    """Names the chat template of a tokenizer for messages: where it came from and how it begins."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default", "")
    opening = " ".join((template or "").split())[:60]
    return f"the chat template of {tokenizer.name_or_path or 'this tokenizer'!r} (it begins with {opening!r})"


def render_text(
    tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    template_arguments: Mapping[str, Any] | None = None,
) -> str:
    """Renders `messages` to text; arguments and errors as for `render_texts`."""
    (text,) = render_texts(
        tokenizer, [messages], add_generation_prompt=add_generation_prompt, template_arguments=template_arguments
    )
    return text


def render_texts(
    tokenizer,
    conversations: Iterable[Sequence[Mapping[str, Any]]],
    *,
    add_generation_prompt: bool,
    template_arguments: Mapping[str, Any] | None = None,
) -> list[str]:
    """Renders several conversations to text, in less time than one by one.

    Args:
      tokenizer: a transformers tokenizer with a chat template.
      conversations: of each the messages, {"role", "content"} of each turn.
      add_generation_prompt: whether to end with the header of the answer that is to be generated.
      template_arguments: further variables of the template, such as {"enable_thinking": False}.

    Raises:
      ChatTemplateError: there is no template, it reaches for Python internals, or it fails on one of them.
    """
    from transformers.utils.chat_template_utils import render_jinja_template  # here, since importing it takes a second

    arguments = dict(template_arguments or {})
    _check_arguments(tokenizer, arguments)
    check_safe(tokenizer)
    try:
        # What apply_chat_template does with dicts of text, in half its time: there are two renderings for every answer.
        texts, _ = render_jinja_template(
            conversations=[[dict(message) for message in messages] for messages in conversations],
            chat_template=tokenizer.get_chat_template(tools=arguments.get("tools")),
            add_generation_prompt=add_generation_prompt,
            **{**tokenizer.special_tokens_map, **arguments},
        )
    except Exception as error:  # foreign code: whatever it raises is a fault of the template or of the messages
        raise ChatTemplateError(f"{describe(tokenizer)} fails on this conversation: {error}") from error
    return list(texts)


def arguments_from_flag(text: str, name: str = "template_arguments") -> dict[str, Any]:
    """Template arguments from the text of the flag --template_arguments, or those of another flag of JSON.

    Raises:
      ValueError: it is not a JSON object.
    """
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--{name}={text!r} is not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError(f'--{name}={text!r} is not a JSON object such as {{"enable_thinking": false}}')
    return arguments


def check_safe(tokenizer) -> None:
    """Refuses a tokenizer whose chat templates reach for Python internals.

    What is found in the source is refused by name; what a template would piece together at run time meets the sandbox.

    Raises:
      ChatTemplateError: there is no template, it does not parse, or it names an attribute that begins with "_".
    """
    templates = tokenizer.chat_template
    if not templates:
        raise ChatTemplateError(
            f"{tokenizer.name_or_path or 'this tokenizer'!r} has no chat template; use an instruction-tuned target, "
            "or prompts of raw text"
        )
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        try:
            private = _private_names(template)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"{describe(tokenizer)} can't be parsed: {error}") from error
        if private:
            raise ChatTemplateError(
                f"{describe(tokenizer)} reaches for {', '.join(private)}; names that begin with an underscore lead to "
                "Python internals and no chat template needs them: do not use this checkpoint"
            )


@functools.lru_cache(maxsize=32)
def _private_names(template: str) -> tuple[str, ...]:
    """Underscore names that a template looks up: x.__name__, x["__name__"], x | attr("__name__")."""
    tree = _PARSER.parse(template)
    attributes = {node.attr for node in tree.find_all(jinja2.nodes.Getattr) if node.attr.startswith("_")}
    strings = {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
    return tuple(sorted(attributes | {s for s in strings if re.fullmatch(r"__\w+__", s)}))


def _check_arguments(tokenizer, arguments: Mapping[str, Any]) -> None:
    # A template variable called "tokenize" would otherwise switch the tokenizer's own behaviour.
    clashing = sorted(_parameters(type(tokenizer)) & set(arguments))
    if clashing:
        raise ChatTemplateError(
            f"template_arguments may not set {', '.join(clashing)}; it is for variables of the template, "
            "such as enable_thinking"
        )


@functools.lru_cache(maxsize=8)
def _parameters(kind: type) -> frozenset[str]:
    """Names that a tokenizer's apply_chat_template keeps for itself."""
    taken = set(inspect.signature(kind.apply_chat_template).parameters) | {"messages"}
    return frozenset(taken - {"tools", "documents", "kwargs", "self"})
