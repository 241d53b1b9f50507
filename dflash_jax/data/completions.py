"""The OpenAI completions protocol: what is asked of a server, and the answer's token ids, checked.

A prompt is sent as token ids, so the server reads exactly those. vLLM (since 2025) and SGLang (since July 2026) return
the ids that they sampled when asked (`return_token_ids`). Of other servers the text is tokenised: most often, but not
always, these are the ids that were sampled.
"""

import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

from dflash_jax.data.answer_log import Answer
from dflash_jax.data.http_json import RequestFailed

_NO_CHARACTER = "\ufffd"  # what decoding puts in the place of bytes that are no character


@dataclasses.dataclass(frozen=True)
class Completions:
    """Requests with one set of settings, and their answers. For any number of threads.

    model: as the server calls it. tokenizer, embedding_rows, stop_token_ids: the target's. max_new_tokens, temperature,
    top_p, top_k: as for `dflash_jax.generate`. fields: further ones of the request; one that is None is left out.
    """

    model: str
    tokenizer: Any
    embedding_rows: int
    stop_token_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # A fast tokenizer can't encode in two threads at once.
    _tokenising: Any = dataclasses.field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def request(self, prompt_ids: list[int], seed: int) -> dict[str, Any]:
        """The body of a request to /v1/completions."""
        body = {
            "model": self.model,
            "prompt": prompt_ids,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "seed": seed,
            # All settings are sent: servers take others from the model's generation_config.json where none is given.
            "top_p": self.top_p or 1.0,
            "top_k": self.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(self.stop_token_ids),
            "return_token_ids": True,
            "skip_special_tokens": False,  # a text without them could not be tokenised back
        }
        return {name: value for name, value in {**body, **self.fields}.items() if value is not None}

    def answer(self, reply: Any, prompt_ids: list[int]) -> Answer:
        """What a server's reply says.

        Raises:
          RequestFailed: the reply is not one to this request.
        """
        choice = _only_choice(reply)
        text, reason = choice.get("text"), choice.get("finish_reason")
        if not isinstance(text, str):
            raise RequestFailed("a reply without text", f"its text is {text!r:.80}")
        if reason not in ("stop", "length"):
            raise RequestFailed("an answer that was broken off", f"its finish_reason is {reason!r:.80}")
        if choice.get("token_ids") is None:
            tokens, ids_from = self._tokenised(text, reason), "text"
        else:
            tokens, ids_from = self._sampled(choice, prompt_ids, text), "server"
        stop = next((i for i, token in enumerate(tokens) if token in self.stop_token_ids), None)
        if stop is not None:
            tokens, reason = tokens[: stop + 1], "stop"
        elif reason == "stop":
            tokens = [*tokens, self._stop_token(choice)]
        if not tokens:
            raise RequestFailed("an answer without tokens")
        return Answer(tokens, reason, ids_from)

    def _sampled(self, choice: Mapping[str, Any], prompt_ids: list[int], text: str) -> list[int]:
        """The ids that the server sampled."""
        tokens = self._checked(choice["token_ids"])
        if choice.get("prompt_token_ids") not in (None, prompt_ids):
            raise RequestFailed("a server that read another prompt", f"it read {choice['prompt_token_ids']!r:.80}")
        if len(tokens) > self.max_new_tokens:
            raise RequestFailed("an answer beyond its budget", f"{len(tokens)} tokens of {self.max_new_tokens}")
        ended = bool(tokens) and tokens[-1] in self.stop_token_ids
        spoken = (tokens, tokens[:-1]) if ended else (tokens,)  # texts come with the stop token or without
        texts = {_comparable(self._decode(part, skip)) for part in spoken for skip in (False, True)}
        if _comparable(text) not in texts:
            raise RequestFailed("ids that say something else than the text", "does the server have another tokenizer?")
        return tokens

    def _tokenised(self, text: str, reason: str) -> list[int]:
        """The ids of a text."""
        if reason == "length":
            text = text.rstrip(_NO_CHARACTER)  # the first bytes of a character that was cut
        if _NO_CHARACTER in text:
            raise RequestFailed("a text with bytes that are no character, whose ids can't be told")
        with self._tokenising:
            tokens = self._checked(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if self._decode(tokens, False) != text:
            raise RequestFailed("a text that changes when it is tokenised and decoded")
        return tokens

    def _checked(self, ids: Any) -> list[int]:
        if not isinstance(ids, list) or any(type(token) is not int for token in ids):
            raise RequestFailed("token ids that are not integers", f"{ids!r:.80}")
        beyond = [token for token in ids if not 0 <= token < self.embedding_rows]
        if beyond:
            raise RequestFailed("token ids outside the vocabulary", f"{beyond[0]} of {self.embedding_rows}")
        return ids

    def _stop_token(self, choice: Mapping[str, Any]) -> int:
        """The stop token that ended an answer without holding it: the one that vLLM or SGLang name, else the usual."""
        named = [choice.get("stop_reason"), choice.get("matched_stop"), self.tokenizer.eos_token_id]
        found = [token for token in named if type(token) is int and token in self.stop_token_ids]
        if not found:
            raise RequestFailed("an answer that ended without a stop token of the target", f"by {named[:2]}")
        return found[0]

    def _decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return self.tokenizer.decode(
            tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )


def _only_choice(reply: Any) -> Mapping[str, Any]:
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise RequestFailed("a reply without an answer", f"{reply!r:.80}")
    return choices[0]


def _comparable(text: str) -> str:
    """A text without what servers treat differently: the ends, and bytes that are no character."""
    return text.replace(_NO_CHARACTER, "").strip()
