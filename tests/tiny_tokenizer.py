"""A byte-level BPE tokenizer that tests build in milliseconds, dressed like that of a model family."""

from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "chat_templates"
_CORPUS = [
    "system user assistant\n\n",
    "Hello there, how are you? I am fine.",
    "Name a colour. Blue. And another? Red.",
]
# How Llama 3 and Qwen split text before merging, as published: line breaks stay together whatever follows them.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def tiny_tokenizer(family: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """Builds the tokenizer of "smollm2", "qwen2_5", "qwen3" or "llama3" over a tiny vocabulary.

    As published: Qwen has no beginning of sequence, SmolLM2 calls <|im_start|> so but adds none, Llama 3 adds one.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer(family)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in (_LLAMA3 if family == "llama3" else _CHATML)])
    roles = {"eos_token": "<|im_end|>"}
    if family == "llama3":
        bos = "<|begin_of_text|>"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
        roles = {"bos_token": bos, "eos_token": "<|eot_id|>"}
    elif family == "smollm2":
        roles["bos_token"] = "<|im_start|>"
    elif family == "qwen3":
        tokenizer.add_tokens([AddedToken(s, special=False, normalized=False) for s in ("<think>", "</think>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, name_or_path=f"tiny-{family}", **roles)
    fast.chat_template = (TEMPLATES / f"{family}.jinja").read_text() if template is None else template
    return fast


def _pre_tokenizer(family: str) -> pre_tokenizers.PreTokenizer:
    if family == "smollm2":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    pattern = _SPLIT.replace("{1,3}", "") if family.startswith("qwen") else _SPLIT
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
