"""A byte-level BPE tokenizer that tests build in milliseconds, dressed like that of a model family."""

from pathlib import Path

from tokenizers import (
    AddedToken,
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
_CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def tiny_tokenizer(family: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """Builds the tokenizer of "smollm2", "qwen2_5", "qwen3" or "llama3" over a tiny vocabulary.

    As published: Qwen has no beginning of sequence, SmolLM2 calls <|im_start|> so but adds none, Llama 3 adds one.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
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
        tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, name_or_path=f"tiny-{family}", **roles)
    fast.chat_template = (TEMPLATES / f"{family}.jinja").read_text() if template is None else template
    return fast
