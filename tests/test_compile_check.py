"""Compiling an experiment for hardware that is not here: what is counted, what fits, what is refused."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from tiny_run import settings, write_config
from tpu_compiler import requires_libtpu

from dflash_jax import compile_check
from dflash_jax.cli import load_config_file
from dflash_jax.compile_report import Program, report
from dflash_jax.compiled_work import Work, array_bytes, work_of
from dflash_jax.config import to_experiment
from dflash_jax.hardware import CHIPS, Hardware, HardwareError, hardware
from dflash_jax.models.family import parse_target_config
from dflash_jax.sharding import MESH_AXES, make_mesh, mesh_sizes
from dflash_jax.training.setup import mesh_for

MESH = jax.sharding.AbstractMesh((1, 8, 1), ("data", "fsdp", "tensor"))
PAPER = ["qwen3_4b", "qwen3_8b", "llama31_8b", "qwen3_8b_thinking", "qwen3_8b_long_context"]
TINY = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def test_a_loop_counts_as_often_as_it_runs():
    def function(x, weights):
        return jax.lax.scan(lambda x, weight: (x @ weight, None), x, weights)[0]

    x, weights = jnp.ones((32, 48)), jnp.ones((7, 48, 48))
    work = work_of(jax.jit(function).lower(x, weights).compile().as_text())
    assert work.flops == 7 * 2 * 32 * 48 * 48
    assert work.unknown_loops == 0
    read_and_written = 4 * 7 * (48 * 48 + 2 * 32 * 48)
    assert read_and_written <= work.bytes_moved < 3 * read_and_written  # the carry is copied, too


def test_a_window_that_pads_or_dilates_counts_what_it_meets():
    """The two forms in which TPU programs write the batch of a product."""
    text = """
ENTRY %main (a: bf16[4,64,256], b: bf16[16,4096,1]) -> bf16[4,64,64] {
  %a = bf16[4,64,256]{2,1,0} parameter(0)
  %b = bf16[16,4096,1]{1,0,2} parameter(1)
  %w = bf16[8,128,4096]{2,1,0} parameter(2)
  %heads = bf16[16,8,128]{2,0,1} convolution(%b, %w), window={size=8 pad=7_7 rhs_reversal=1}, dim_labels=bf0_0oi->b0f
  ROOT %c = bf16[4,64,64]{2,1,0} convolution(%a, %a), window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0oi->0bf
}
"""
    assert work_of(text).flops == 2 * 16 * 8 * 128 * 4096 + 2 * 4 * 64 * 64 * 256


def test_collectives_are_counted_by_what_goes_over_links():
    text = """
%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %x = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %r = f32[8,4]{1,0} all-reduce(%x), replica_groups={}, to_apply=%add
  %part = f32[2,4]{1,0} slice(%x), slice={[0:2], [0:4]}
  %s = (f32[2,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%part), dimensions={0}
  %d = f32[8,4]{1,0} all-gather-done(%s)
}
%condition (p: (s32[], f32[8,4])) -> pred[] {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %bound = s32[] constant(5)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %bound), direction=LT
}
ENTRY %main (a: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %w = (s32[], f32[8,4]{1,0}) while(%a), condition=%condition, body=%body
}
"""
    work = work_of(text)
    assert work.count == {"all-reduce": 5, "all-gather": 5}
    assert work.bytes == {"all-reduce": 5 * 2 * 128, "all-gather": 5 * 128}


def test_arrays_on_the_chip_take_no_memory():
    assert array_bytes("(bf16[8,4]{1,0:T(8,128)(2,1)S(1)}, f32[3]{0})") == 12


def test_a_slice_that_is_fetched_ahead_counts_as_what_is_fetched():
    """Some TPU programs bring weights to the chip piece by piece; the type of each fetch holds the whole of them."""
    text = """
ENTRY %main (a: s8[800]) -> s8[100] {
  %a = s8[800]{0:T(1024)(128)(4,1)} parameter(0)
  %s = ((s8[800]{0:T(1024)(128)(4,1)}), s8[100]{0:T(1024)(128)(4,1)S(1)}, s32[]{:S(2)}) slice-start(%a), slice={[0:100]}
  %d = s8[100]{0:T(1024)(128)(4,1)S(1)} slice-done(%s)
}
"""
    assert work_of(text).bytes_moved == 100
    assert work_of(text.replace("S(1)", "")).bytes_moved == 200  # to memory
    where = text.replace("128)(4,1)}), s8[100]", "128)(4,1)}, s32[]{:S(2)}), s8[100]").replace(
        "(%a), slice", "(%a, %i), slice"
    )
    assert work_of(where.replace("slice-start(", "dynamic-slice-start(")).bytes_moved == 100


@pytest.mark.parametrize("name", PAPER)
def test_a_configuration_of_the_paper_is_complete(name):
    """Its target's shapes are at hand, its rows and heads can be shared by eight devices, its taps exist."""
    experiment = to_experiment(load_config_file(f"configs/{name}.py"))
    target = compile_check.known_target(experiment.model.target, None)
    mesh, training = experiment.mesh, experiment.training
    data, fsdp, sequence, tensor = mesh_sizes((mesh.data, mesh.fsdp, mesh.sequence, mesh.tensor), 8)
    assert all(length % sequence == 0 for length in experiment.data.length_buckets)
    assert training.rows_per_step // training.accumulation % (data * fsdp) == 0
    assert target.num_kv_heads % tensor == 0
    assert experiment.model.mask_token_id < target.vocab_size


def arguments(tmp_path: Path, **fields) -> list[str]:
    experiment = settings(tmp_path, tmp_path / "chats.jsonl", tmp_path / "run", **fields)
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    file = write_config(tmp_path / "config.py", experiment)
    return ["compile_check", "--config", str(file), "--target_config", str(tmp_path / "tiny.json")]


@pytest.mark.long
@requires_libtpu
def test_a_tiny_experiment_compiles_for_a_tpu_slice(tmp_path, capsys):
    fields = {"mesh__data": 2, "mesh__fsdp": 2, "training__rows_per_step": 8, "training__accumulation": 2}
    with pytest.raises(SystemExit) as end:
        compile_check.main([*arguments(tmp_path, **fields), "--hardware", "v5e:2x2"])
    text = capsys.readouterr().out
    assert end.value.code == 0, text
    assert "v5e:2x2: mesh data 2, fsdp 2, sequence 1, tensor 1; 16 GB a device" in text
    rows = {line.split(" | ")[0].lstrip("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert {"features", "step", "decode"} <= set(rows) and all("yes" in rows[name] for name in ("features", "step"))
    assert "step: 2 × 4 rows of 32 tokens, 6 anchors × 4 slots a row; collectives" in text and "all-reduce" in text


def test_the_teacher_loss_and_packing_have_their_arrays(tmp_path):
    fields = {"training__loss": "teacher", "training__loss_tokens": 16, "data__packing": True}
    experiment = settings(tmp_path, tmp_path / "chats.jsonl", tmp_path / "run", **fields)
    mesh = make_mesh(devices=jax.devices()[:1])
    models = compile_check.Models(experiment, parse_target_config(TINY), mesh)
    with jax.set_mesh(mesh):
        step = compile_check.training_step(models)
        assert [leaf.shape for leaf in jax.tree.leaves(step.in_avals)].count((1, 4, 32)) == 3  # tokens, mask, starts
        taps, hidden = (4, 32, 2, 32), (4, 32, 32)
        shapes = [leaf.shape for leaf in jax.tree.leaves(compile_check.feature_pass(models).out_info)]
    assert shapes == [hidden, taps]
    assert compile_check.resident(models)["features"] == 4 * math.prod(taps) + 4 * math.prod(hidden)


def test_the_sizes_of_the_programs_are_those_they_are_compiled_for(tmp_path):
    fields = {"training__rows_per_step": 6, "training__accumulation": 2}
    experiment = settings(tmp_path, tmp_path / "chats.jsonl", tmp_path / "run", **fields)
    mesh = make_mesh(devices=jax.devices()[:1])
    models = compile_check.Models(experiment, parse_target_config(TINY), mesh)
    decoded = {"batch": 3, "context": 300}
    with jax.set_mesh(mesh):
        programs = {
            "features": compile_check.feature_pass(models),
            "step": compile_check.training_step(models),
            "decode": compile_check.decoding_round(models, **decoded),
        }
    shapes = {name: {leaf.shape for leaf in jax.tree.leaves(program.in_avals)} for name, program in programs.items()}
    assert compile_check.sizes_of(models, **decoded) == {
        "features": "6 rows of 32 tokens",
        "step": "2 × 3 rows of 32 tokens, 6 anchors × 4 slots a row",
        "decode": "batch 3, width 4, caches of 384 positions",
    }
    assert (6, 32) in shapes["features"] and (2, 3, 32) in shapes["step"]
    assert (3, 2, 384, 8) in shapes["decode"] and "3x4x64xf32" in programs["decode"].as_text()  # a cache, logits


def test_features_of_long_rows_are_divided_by_rows_and_positions(tmp_path):
    experiment = settings(tmp_path, tmp_path / "chats.jsonl", tmp_path / "run", training__loss="teacher")
    mesh = jax.sharding.AbstractMesh((1, 2, 4, 1), MESH_AXES)
    models = compile_check.Models(experiment, parse_target_config(TINY), mesh)
    features = 4 * 32 * (2 + 1) * 32 * 4  # rows, tokens, two taps and the final states, sizes, bytes
    assert compile_check.resident(models)["features"] == features / 8


def test_what_does_not_fit_is_said_and_how_it_may():
    programs = [Program("step", "2 × 4 rows", 1.0, temporary=90e9, work=Work(flops=459e12))]
    target = Hardware("v5p:2x2x2", CHIPS["v5p"], [], {})
    text, fits = report({"target": 1e9}, MESH, programs, target)
    assert not fits and "| NO |" in text and "raise mesh.fsdp" in text
    assert "| 1e+03 | compute |" in text  # a second, of 459 TFLOP at 459 TFLOP/s
    assert "step: 2 × 4 rows; collectives none" in text


def test_decoding_holds_its_caches_and_nothing_of_training():
    kept, target = {"target": 60e9, "moments": 30e9}, Hardware("v5p:2x2x2", CHIPS["v5p"], [], {})
    for given, fits in ((80e9, True), (94e9, False)):
        text, does = report(kept, MESH, [Program("decode", "batch 1", 1.0, given=given, temporary=1e9)], target)
        assert does is fits and f"holds {given / 1e9:.2f} GB" in text
        assert ("Decoding does not fit: raise mesh.tensor" in text) is not fits and "mesh.fsdp" not in text


def test_a_program_that_a_compiler_finds_no_room_for_does_not_fit():
    def fails(compiler_options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 21.19G exceeds 15.75G\nmore")

    target = Hardware("v5e:1x1", CHIPS["v5e"], [], {})
    program = compile_check.compiled("step", "2 rows", lambda: SimpleNamespace(compile=fails), target)
    text, fits = report({"target": 1e9}, MESH, [program], target)
    assert not fits and "| step | – | – | – | NO |" in text
    assert "step: 2 rows; the compiler found no room: RESOURCE_EXHAUSTED: 21.19G exceeds 15.75G" in text


@requires_libtpu
def test_a_part_of_the_target_is_said_to_be_one(tmp_path, capsys):
    command = [*arguments(tmp_path), "--hardware", "v5e:2x2", "--programs", "decode"]
    with pytest.raises(SystemExit):
        compile_check.main([*command, "--target_layers", "2"])
    assert "compiled with 2 of the target's " in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        compile_check.main([*command, "--target_layers", "99"])
    assert end.value.code == 2 and "--target_layers=99: the target has" in capsys.readouterr().err


@requires_libtpu
def test_wrong_arguments_are_refused_by_name(tmp_path, capsys):
    for name in ("h200x0", "h200x16", "v6e:2x4x2", "v5p:2x2", ""):
        with pytest.raises(HardwareError, match=f"hardware '{name}' is not known.*h200x1 to h200x8"):
            hardware(name)
    with pytest.raises(HardwareError, match="hardware 'v9:2x2' is not known"):
        hardware("v9:2x2")
    with pytest.raises(HardwareError, match="does not know the slice"):
        hardware("v5e:3x7")
    with pytest.raises(SystemExit):
        compile_check.main([*arguments(tmp_path), "--hardware", "v5e:2x2,"])  # told before the first is compiled for
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit):
        compile_check.main([*arguments(tmp_path, mesh__data=4), "--hardware", "v5e:2x2,v5e:2x4"])
    said = capsys.readouterr()
    assert said.out == "" and "don't make up the 8 devices" in said.err
    with pytest.raises(SystemExit):
        compile_check.main([*arguments(tmp_path, mesh__data=3), "--hardware", "v5e:2x2"])
    message = "mesh data=3, fsdp=1, sequence=1, tensor=1: these sizes don't make up the 4 devices"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("programs", "step,decod", "--programs=step,decod: no decod; use features, step, decode"),
        ("target_layers", "0", "--target_layers=0: must be at least 1"),
        ("dump", "nowhere", "--dump=nowhere: there is no such folder"),
        ("target_config", "nowhere.json", "--target_config=nowhere.json: No such file or directory"),
        ("target_config", __file__, f"{__file__}: Extra data"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_compiled(tmp_path, capsys, option, value, message):
    with pytest.raises(SystemExit) as end:
        compile_check.main([*arguments(tmp_path), "--hardware", "v5e:2x2", f"--{option}={value}"])
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_a_program_that_can_not_be_written_names_the_flag(tmp_path):
    (tmp_path / "step.v5e-2x2.hlo").mkdir()
    program = SimpleNamespace(memory_analysis=lambda: None, as_text=lambda: "HLO")
    lowered = SimpleNamespace(compile=lambda compiler_options: program)
    target = SimpleNamespace(name="v5e:2x2", options=None)
    with pytest.raises(ValueError, match=f"--dump='{tmp_path}': can't be written: .*Is a directory"):
        compile_check.compiled("step", "", lambda: lowered, target, str(tmp_path))


@requires_libtpu
@pytest.mark.long
@pytest.mark.parametrize("name", PAPER)
def test_the_programs_of_a_configuration_of_the_paper_are_traced_for_a_slice(name):
    """At their real sizes, but for the layers of the target, with the kernels of TPUs: what fails before compiling does
    so here. Compiling takes minutes."""
    experiment = compile_check._with_taps_in(to_experiment(load_config_file(f"configs/{name}.py")), 2)
    target = dataclasses.replace(compile_check.known_target(experiment.model.target, None), num_layers=2)
    mesh = mesh_for(experiment, target, hardware("v5p:2x2x2").devices)
    with jax.set_mesh(mesh):
        models = compile_check.Models(experiment, target, mesh)
        rows, width = experiment.training.rows_per_step, experiment.model.block_size
        (taps,) = jax.tree.leaves(compile_check.feature_pass(models).out_info)
        step = compile_check.training_step(models).as_text()
        decoded = compile_check.decoding_round(models, batch=1, context=2048).as_text()
    assert taps.shape == (rows, experiment.data.length_buckets[-1], 2, target.hidden_size)
    assert "tpu_custom_call" in step and f"1x{width}x{target.vocab_size}xf32" in decoded


@requires_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", PAPER)
def test_a_configuration_of_the_paper_fits_a_slice(name, capsys):
    with pytest.raises(SystemExit) as end:
        compile_check.main(["compile_check", "--config", f"configs/{name}.py", "--hardware", "v5p:2x2x2"])
    assert end.value.code == 0, capsys.readouterr().out


def test_the_bundled_shapes_are_of_supported_targets():
    files = sorted(Path("configs/targets").glob("*.json"))
    assert files
    for file in files:
        assert parse_target_config(json.loads(file.read_text())).num_layers >= 32
