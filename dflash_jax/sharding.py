"""Where arrays live: the mesh of devices, and one table from what an axis means to the mesh axes that divide it.

The mesh has four axes. "data" and "fsdp" both divide the rows of a batch; "fsdp" divides the parameters too, which
are gathered where they are used; "sequence" divides the positions of a row, the blocks drawn from it, and, as "fsdp"
does, the parameters but for the tables; "tensor" divides heads, MLP features and the vocabulary. Code says what the
axes of an array mean (`constrain`, PARAMETERS), RULES says what that comes to, and the compiler does the rest. Without
a mesh in the context (`jax.set_mesh`) nothing here does anything, so one device runs the same code.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "sequence", "tensor")

# What an axis means → the mesh axes that divide it.
RULES: dict[str, tuple[str, ...]] = {
    "rows": ("data", "fsdp"),
    "positions": ("sequence",),
    "blocks": ("sequence",),
    "heads": ("tensor",),
    "features": ("tensor",),
    "vocabulary": ("tensor",),
    "hidden": ("fsdp", "sequence"),
    "columns": ("fsdp",),  # of the tables
    "row_groups": ("data",),
}

# The end of a parameter's path → what its axes mean. What is not listed (norms, biases of sums) is on every device.
PARAMETERS: dict[str, tuple[str, ...]] = {
    r"\b[qkv]_proj\.weight": ("heads", "hidden"),
    r"\b[qkv]_proj\.bias": ("heads",),
    r"\bo_proj\.weight": ("hidden", "heads"),
    r"\b(gate|up)_proj\.weight": ("features", "hidden"),
    r"\b(gate|up)_proj\.bias": ("features",),
    r"\bdown_proj\.weight": ("hidden", "features"),
    r"\bfc\.weight": ("hidden", "features"),
    r"\b(embedding|head|shortlist)": ("vocabulary", "columns"),
}

_AnyMesh = Mesh | AbstractMesh


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, *, sequence: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh of data · fsdp · sequence · tensor devices; neighbouring devices share the last axes.

    Args:
        data, fsdp, tensor, sequence: sizes of the axes; one of them may be −1, for all devices that the others leave.
        devices: default: all, of every process.

    Raises:
        ValueError: the sizes don't make up the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = mesh_sizes((data, fsdp, sequence, tensor), len(devices))
    return jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=devices)


def mesh_sizes(sizes: tuple[int, ...], devices: int) -> tuple[int, ...]:
    """The sizes with a −1 replaced by what is left of the devices.

    Raises:
        ValueError: they don't make up that number.
    """
    named = ", ".join(f"{name}={size}" for name, size in zip(MESH_AXES, sizes, strict=True))
    known = int(np.prod([size for size in sizes if size != -1]))
    if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
        raise ValueError(f"mesh {named}: sizes must be at least 1, and at most one of them −1 (what is left)")
    filled = tuple(devices // known if size == -1 else size for size in sizes)
    if int(np.prod(filled)) != devices:
        raise ValueError(f"mesh {named}: these sizes don't make up the {devices} devices there are; −1 is what is left")
    return filled


def spec_of(mesh: _AnyMesh, meaning: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
    """How an array whose axes mean this is divided. An axis that a mesh axis does not divide evenly stays whole."""
    return PartitionSpec(*(_divided(mesh, name, size) for name, size in zip(meaning, shape, strict=True)))


def dividing(mesh: _AnyMesh, name: str, size: int) -> tuple[str, ...]:
    """The mesh axes that divide an axis of this meaning and size, those of one device included."""
    taken: tuple[str, ...] = ()
    for axis in RULES[name]:
        if size % mesh.shape[axis] == 0:
            taken, size = (*taken, axis), size // mesh.shape[axis]
    return taken


def _divided(mesh: _AnyMesh, name: str | None, size: int) -> tuple[str, ...] | None:
    axes = dividing(mesh, name, size) if name else ()
    return tuple(axis for axis in axes if mesh.shape[axis] > 1) or None


def shares(name: str, size: int) -> int:
    """Among how many devices of the context's mesh an axis of this meaning and size is divided."""
    mesh = current_mesh()
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in dividing(mesh, name, size))


def parameter_spec(mesh: _AnyMesh, path: str, shape: Sequence[int]) -> PartitionSpec:
    """How the parameter at this dotted path is divided, of a model or of an optimizer's state over it."""
    for pattern, meaning in PARAMETERS.items():
        if len(meaning) == len(shape) and re.search(rf"{pattern}(\.value)?$", path):
            return spec_of(mesh, meaning, shape)
    return PartitionSpec()


def parameter_shardings(mesh: Mesh, tree: Any) -> Any:
    """The sharding of every leaf of a tree of parameters (arrays or their shapes)."""
    return _by_path(tree, lambda path, leaf: NamedSharding(mesh, parameter_spec(mesh, path, leaf.shape)))


def place_parameters(mesh: Mesh, tree: Any) -> Any:
    """The tree with its arrays divided over the mesh. A process has the whole of an array, or what it has of it on the
    mesh; of several processes, all have to call."""

    def place(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
        if sharding.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        host = whole(leaf)  # what was copied from a divided target is divided already
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: host[index])

    return jax.tree.map(place, tree, parameter_shardings(mesh, tree))


def whole(x: jax.Array) -> np.ndarray:
    """The array on this host, gathered from other hosts where need be: all of them have to ask."""
    if isinstance(x.sharding, NamedSharding) and not x.is_fully_addressable and not x.is_fully_replicated:
        everywhere = NamedSharding(x.sharding.mesh, PartitionSpec())
        x = jax.jit(_same, out_shardings=everywhere)(x)
    return np.asarray(x)


def _same(x: jax.Array) -> jax.Array:
    return x  # a function of the module, lest every call compile anew


def to_devices(tree: Any) -> Any:
    """Host arrays, of which every process has the whole, on the devices of the context: divided by their first axis,
    the rows, over its mesh if there is one."""
    return jax.tree.map(lambda x: rows_to_devices(x.shape, lambda rows: x[rows]), tree)


def rows_to_devices(shape: Sequence[int], read: Callable[[slice], np.ndarray]) -> jax.Array:
    """An array as `to_devices` makes it, of which a process reads only the rows of its own devices."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return jnp.asarray(read(slice(None)))
    sharding = NamedSharding(mesh, spec_of(mesh, ("rows",), shape[:1]))
    return jax.make_array_from_callback(tuple(shape), sharding, lambda index: read(index[0] if index else slice(None)))


def constrain_parameters(tree: Any) -> Any:
    """Inside jit: parameters, gradients or moments, divided as the table says."""
    mesh = current_mesh()
    if mesh is None:
        return tree
    return _by_path(
        tree, lambda path, leaf: jax.lax.with_sharding_constraint(leaf, parameter_spec(mesh, path, leaf.shape))
    )


def constrain(x: jax.Array, *meaning: str | None) -> jax.Array:
    """Inside jit: an activation whose first axes mean this; the others are whole."""
    mesh = current_mesh()
    if mesh is None:
        return x
    padded = (*meaning, *(None,) * (x.ndim - len(meaning)))
    return jax.lax.with_sharding_constraint(x, spec_of(mesh, padded, x.shape))


def lookup(table_VD: jax.Array, tokens_BT: jax.Array, *meaning: str | None) -> jax.Array:
    """Inside jit: the tokens' rows of a table, divided as the axes of the tokens [B, …] mean."""
    x = jnp.take(table_VD, tokens_BT, axis=0)
    # From where the columns are to where the rows belong, step by step: at once, the compiler gives every device all.
    in_columns = constrain(x, "row_groups", *(None,) * (tokens_BT.ndim - 1), "columns")
    return constrain(constrain(in_columns, "rows"), *meaning)


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that the parameters of a model are divided over; None: they are on one device."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree))
    meshes = (sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh) and mesh.size > 1), None)


def on_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """The context in which programs are divided over the mesh; of None, one that changes nothing."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def current_mesh() -> AbstractMesh | None:
    """The mesh of the context, or None where there is nothing to divide over."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 or mesh.manual_axes else mesh


def over_blocks(call: Callable, *arrays: jax.Array, whole: Sequence[Any] = ()) -> tuple[Any, Any]:
    """call(*arrays, *whole) on every device with its own rows and blocks, for code that walks through them in order.

    Args:
        call: returns (sums, by_block): sums over blocks, which are added up over devices, and arrays [B, A, …].
        arrays: all [B, A, …], rows and blocks first.
        whole: what every device sees as it is. "tensor" may divide it further, inside the call too.
    """
    mesh = current_mesh()
    if mesh is None:
        return call(*arrays, *whole)
    B, A, *_ = arrays[0].shape
    rows, blocks = _divided(mesh, "rows", B) or (), _divided(mesh, "blocks", A) or ()
    if not (axes := rows + blocks):
        return call(*arrays, *whole)
    divided = PartitionSpec(rows, blocks)

    def local(*arguments):
        sums, by_block = call(*arguments)
        return jax.lax.psum(sums, axes), by_block

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(divided,) * len(arrays) + (PartitionSpec(),) * len(whole),
        out_specs=(PartitionSpec(), divided),
        axis_names=set(axes),
        check_vma=False,
    )(*arrays, *whole)


def _by_path(tree: Any, function: Callable[[str, Any], Any]) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: function(jax.tree_util.keystr(path, simple=True, separator="."), leaf), tree
    )
