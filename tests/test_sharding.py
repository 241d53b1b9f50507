"""Eight devices give what one gives: loss, gradients, updates, tokens, for every way to divide them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Devices are made when jax starts, so this file is run again as a program that has eight.
DEVICES = 8


@pytest.mark.parametrize(
    ("check", "mesh"),
    [
        ("training", (1, 2, 2, 2)),
        ("decoding", (1, 1, 8)),
        ("work", (8, 1, 1)),
        ("loading", (1, 4, 2)),
        pytest.param("long_rows", (1, 1, 1, 8), marks=pytest.mark.long),
        pytest.param("training", (2, 2, 2), marks=pytest.mark.long),
        pytest.param("features", (2, 2, 2), marks=pytest.mark.long),
        pytest.param("training", (1, 8, 1), marks=pytest.mark.long),
        pytest.param("training", (8, 1, 1), marks=pytest.mark.slow),
        pytest.param("training", (1, 1, 8), marks=pytest.mark.long),
        pytest.param("training", (1, 2, 4), marks=pytest.mark.slow),
        pytest.param("decoding", (2, 2, 2), marks=pytest.mark.long),
        pytest.param("decoding", (1, 1, 2, 4), marks=pytest.mark.slow),
        pytest.param("decoding", (1, 8, 1), marks=pytest.mark.slow),
    ],
)
def test_eight_devices_give_what_one_gives(check, mesh, compiled_programs):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={DEVICES}",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    arguments = [check, *map(str, mesh)]
    program = subprocess.run([sys.executable, __file__, *arguments], env=environment, capture_output=True, text=True)
    assert program.returncode == 0, program.stderr
    assert program.stdout == f"{check} on {mesh} equals one device\n"


def models():
    """A target and a drafter whose heads and sizes eight devices can share."""
    from small_models import random_drafter, random_target

    sizes = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 4, "vocab_size": 64, "num_layers": 2}
    target = random_target(factor=4.0, **sizes)
    drafter = random_drafter(
        target.config, factor=4.0, num_layers=1, num_heads=8, num_kv_heads=8, head_dim=4, target_layer_ids=(0, 1)
    )
    return target, drafter


def mesh_of(sizes: tuple[int, ...]):
    """data, fsdp, tensor and, if there is a fourth number, sequence."""
    from dflash_jax.sharding import make_mesh

    return make_mesh(*sizes[:3], sequence=sizes[3] if len(sizes) > 3 else 1)


def check_training(sizes: tuple[int, ...]) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from dflash_jax.models import attention
    from dflash_jax.sharding import make_mesh, place_parameters, to_devices
    from dflash_jax.training.step import (
        Batch,
        StepSettings,
        VocabularyTables,
        context_taps,
        initial_state,
        micro_batches,
        train_step,
    )

    attention.QUERY_CHUNK = 5  # a row of 20 is four chunks, or two for each of two devices
    target, drafter = models()
    settings = StepSettings(
        anchors=6, width=4, mask_id=63, gamma=4.0, loss_chunk=16, compute_dtype="float32", seed=0, backend="xla"
    )
    optimizer = optax.sgd(0.1, momentum=0.9)
    rng = np.random.default_rng(0)
    tokens_BT = rng.integers(0, 64, (16, 20)).astype(np.int32)
    # From no supervised token at all to every one: devices get very different shares of the loss.
    loss_mask_BT = np.arange(20) >= rng.integers(0, 21, (16, 1))
    # Two documents in every row; the second's first token has no context and carries no loss.
    starts_BT = np.where(np.arange(20) < 8, 0, 8) * np.ones((16, 1), np.int32)
    loss_mask_BT[:, 8] = False

    def step(mesh, parts: int, order):
        with jax.set_mesh(mesh):
            model, start = place_parameters(mesh, (target.model, drafter.model))
            state = place_parameters(mesh, initial_state(jax.tree.map(jnp.copy, start), optimizer))
            on_host = tokens_BT[order], loss_mask_BT[order], np.int32(order), starts_BT[order]
            tokens, mask, rows, starts = to_devices(on_host)
            taps = context_taps(model, tokens, starts, layers=(0, 1))
            batch = micro_batches(Batch(tokens, mask, rows, taps, starts=starts), parts)
            tables = VocabularyTables(model.embedding[...], model.head_VD)
            state, sums = train_step(state, tables, batch, settings=settings, optimizer=optimizer)
        return jax.device_get((sums, state))

    one = make_mesh(devices=jax.devices()[:1])
    wanted = step(one, 1, np.arange(16))
    assert float(wanted[0].loss) > 0
    ours = step(mesh_of(sizes), 2, rng.permutation(16))
    for mine, theirs in zip(jax.tree.leaves(ours[0]), jax.tree.leaves(wanted[0]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-6)
    for mine, theirs in zip(jax.tree.leaves(ours[1]), jax.tree.leaves(wanted[1]), strict=True):
        # updates of a tenth of gradients of order 1, summed in another order
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)


def check_decoding(sizes: tuple[int, int, int]) -> None:
    import dataclasses

    import numpy as np
    from small_models import random_prompts

    from dflash_jax import generate
    from dflash_jax.sharding import place_parameters

    target, drafter = models()
    prompts = random_prompts([3, 9, 14, 5, 7, 4], vocab_size=64)
    settings = {"max_new_tokens": 80, "temperature": [0.0, 0.9, 0.0, 1.1, 0.0, 0.0], "batch_size": 4}
    wanted = generate(target, prompts, drafter=drafter, **settings)
    assert any(max(row.acceptance_lengths) > 1 for row in wanted)  # something was accepted, or nothing is shown
    placed = place_parameters(mesh_of(sizes), (target.model, drafter.model))
    ours_target, ours_drafter = (
        dataclasses.replace(loaded, model=model) for loaded, model in zip((target, drafter), placed, strict=True)
    )
    assert generate(ours_target, prompts, drafter=ours_drafter, **settings) == wanted
    some = np.arange(0, 64, 2, dtype=np.int32)
    restricted = ours_drafter.restricted(ours_target, some)
    assert "tensor" in str(restricted.model.head[...].sharding.spec) or sizes[-1] == 1
    wanted = generate(target, prompts, drafter=drafter.restricted(target, some), **settings)
    assert generate(ours_target, prompts, drafter=restricted, **settings) == wanted


def check_work(sizes: tuple[int, int, int]) -> None:
    """Counted in the compiled program: rows divided over eight devices are an eighth of the work on each, and what goes
    between them is the gradient."""
    import jax
    import jax.numpy as jnp
    import optax

    from dflash_jax.compiled_work import work_of
    from dflash_jax.sharding import make_mesh, place_parameters, to_devices
    from dflash_jax.training.step import Batch, StepSettings, VocabularyTables, initial_state, train_step

    target, drafter = models()
    settings = StepSettings(
        anchors=8, width=4, mask_id=63, gamma=4.0, loss_chunk=8, compute_dtype="float32", seed=0, backend="xla"
    )
    optimizer = optax.sgd(0.1)

    def work(mesh):
        shapes = (jnp.zeros((1, 16, 32), jnp.int32), jnp.ones((1, 16, 32), bool), jnp.zeros((1, 16), jnp.int32))
        batch = jax.tree.map(lambda x: to_devices(jax.device_get(x[0]))[None], (*shapes, jnp.zeros((1, 16, 32, 2, 32))))
        model, state = place_parameters(mesh, (target.model, initial_state(drafter.model, optimizer)))
        tables = VocabularyTables(model.embedding[...], model.head_VD)
        lowered = train_step.lower(state, tables, Batch(*batch), settings=settings, optimizer=optimizer)
        return work_of(lowered.compile().as_text())

    with jax.set_mesh(one := make_mesh(devices=jax.devices()[:1])):
        alone = work(one)
    with jax.set_mesh(eight := make_mesh(*sizes)):
        shared = work(eight)
    assert abs(8 * shared.flops / alone.flops - 1) < 0.03, (alone.flops, shared.flops)
    gradient = sum(leaf.nbytes for leaf in jax.tree.leaves(drafter.model))
    moved = shared.bytes["all-reduce"]
    assert set(shared.count) == {"all-reduce"} and 2 * gradient <= moved < 1.2 * 2 * gradient, (gradient, shared)


def check_long_rows(sizes: tuple[int, ...]) -> None:
    """Two rows over all devices: each has its share of the positions, of the blocks and of the work on them."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from dflash_jax.compiled_work import work_of
    from dflash_jax.models import attention
    from dflash_jax.sharding import make_mesh, place_parameters, to_devices
    from dflash_jax.training.step import (
        Batch,
        StepSettings,
        VocabularyTables,
        hidden_and_taps,
        initial_state,
        train_step,
    )

    attention.QUERY_CHUNK = 16  # a device's share of a row is four chunks
    target, drafter = models()
    settings = StepSettings(
        anchors=64, width=4, mask_id=63, gamma=4.0, loss_chunk=16, compute_dtype="float32", seed=0, backend="xla"
    )
    optimizer = optax.sgd(0.1)
    tokens_2T = np.random.default_rng(0).integers(0, 64, (2, 512)).astype(np.int32)

    def run(mesh):
        """The taps' shares, FLOPs of features and step, and the loss."""
        with jax.set_mesh(mesh):
            model, state = place_parameters(mesh, (target.model, initial_state(drafter.model, optimizer)))
            tokens, mask, rows = to_devices((tokens_2T, np.ones((2, 512), bool), np.arange(2, dtype=np.int32)))
            features = hidden_and_taps.lower(model, tokens, layers=(0, 1)).compile()
            _, taps = features(model, tokens)
            batch = jax.tree.map(lambda x: x[None], Batch(tokens, mask, rows, taps))
            tables = VocabularyTables(model.embedding[...], model.head_VD)
            arguments = dict(settings=settings, optimizer=optimizer)
            step = train_step.lower(state, tables, batch, **arguments).compile()
            flops = [work_of(program.as_text()).flops for program in (features, step)]
            shares = {shard.data.shape for shard in taps.addressable_shards}
            own_state = jax.tree.map(jnp.copy, state)  # which the step may consume
            return shares, flops, float(step(own_state, tables, batch)[1].loss)

    (_, alone, wanted), (shares, shared, ours) = run(make_mesh(devices=jax.devices()[:1])), run(mesh_of(sizes))
    assert shares == {(2, 64, 2, 32)}
    assert all(8 * mine < 1.1 * whole for mine, whole in zip(shared, alone, strict=True)), (shared, alone)
    np.testing.assert_allclose(ours, wanted, rtol=2e-6)


def check_loading(sizes: tuple[int, int, int]) -> None:
    """A checkpoint of many shards goes to the devices part by part: no more is read than the devices hold, and no read
    is of more than a part."""
    import tempfile

    import jax
    import numpy as np
    import tiny_models

    from dflash_jax.checkpoints.huggingface import load_target
    from dflash_jax.checkpoints.safetensors_io import TensorFolder
    from dflash_jax.sharding import make_mesh

    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models.torch_target("qwen3", num_hidden_layers=6, num_key_value_heads=4, head_dim=8)
        model.save_pretrained(folder, max_shard_size="30KB")
        assert len(list(Path(folder).glob("*.safetensors"))) > 6
        wanted = load_target(folder).model
        parts = []
        whole_read = TensorFolder.read

        def read(self, name, index=()):
            array = whole_read(self, name, index)
            parts.append((array.nbytes, array.size / np.prod(self.shape(name))))
            return array

        TensorFolder.read = read
        ours = load_target(folder, mesh=make_mesh(*sizes)).model
    held = 0
    for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        held += sum(shard.data.nbytes for shard in mine.addressable_shards)
    matrices = [share for _, share in parts if share < 1]
    assert set(matrices) == {1 / 8} and sum(size for size, _ in parts) <= held


def check_features(sizes: tuple[int, int, int]) -> None:
    """Features that a divided target stores are those of one device, and each device is given those of its rows."""
    import tempfile

    import jax
    import numpy as np
    from tiny_run import chat_row, settings, write_rows, write_target

    from dflash_jax.data import features
    from dflash_jax.data.feature_store import StoredSplit
    from dflash_jax.sharding import make_mesh
    from dflash_jax.training.features import StoredFeatures

    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        rows = [chat_row(str(i), [1, 2, i], rng.integers(0, 50, 8 + i).tolist()) for i in range(10)]
        target, chats = write_target(Path(folder) / "target"), write_rows(Path(folder) / "chats.jsonl", rows)

        def stored(mesh: tuple[int, int, int]) -> StoredSplit:
            fields = {f"mesh__{axis}": size for axis, size in zip(("data", "fsdp", "tensor"), mesh, strict=True)}
            out = f"{folder}/{mesh}"
            run = settings(target, chats, Path(folder) / "run", **fields, training__loss="teacher")
            features.run(run, out, shard_bytes=20_000, say=lambda text: None)
            return StoredSplit(out, "train")

        one, ours = stored((1, 1, 1)), stored(sizes)
        for row, name in ((row, name) for row in range(10) for name in ("taps", "hidden")):
            # sums over heads and features in another order, through four layers
            np.testing.assert_allclose(ours.read(name, row), one.read(name, row), atol=1e-5)
        rows_B = np.array([7, 0, 9, 3])
        with jax.set_mesh(make_mesh(*sizes)):
            taps, hidden = StoredFeatures(ours, with_hidden=True)(dict(tokens_BT=np.zeros((4, 20)), row_index_B=rows_B))
        for name, array in (("taps", taps), ("hidden", hidden)):
            shares = {shard.data.shape[0] for shard in array.addressable_shards}
            assert shares == {4 // (sizes[0] * sizes[1])} and len(array.addressable_shards) == 8
            for slot, row in enumerate(rows_B):
                wanted = ours.read(name, row)
                np.testing.assert_array_equal(array[slot, : len(wanted)], wanted)
                assert not np.any(array[slot, len(wanted) :])


if __name__ == "__main__":
    name, *sizes = sys.argv[1:]
    chosen = tuple(map(int, sizes))
    globals()[f"check_{name}"](chosen)
    print(f"{name} on {chosen} equals one device")
