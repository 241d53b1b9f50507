"""Runs Pallas Mosaic GPU kernels on a CPU: in the interpreter that jax 0.10 holds privately, with what it lacks added.

It models warpgroups as threads, shared memory, barriers and copies. Copies and matrix products are complete at once, so
a missing wait or fence does not show here.
"""

import contextlib
import threading
from unittest import mock

import jax
import jax.numpy as jnp
from jax._src import core
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, params
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state
from jax._src.pallas.mosaic_gpu.interpret.jaxpr_interpret import JaxprInterpreter
from jax._src.state import discharge
from jax._src.state.types import AbstractRef, TransposeTransform, transform_type

interpret_known = JaxprInterpreter.interpret


def interpret(self, jaxpr, token, *arguments):
    """JaxprInterpreter.interpret, one equation at a time: ours or its own."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], arguments, strict=True))

    def value(atom):
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        if equation.primitive in ADDED:
            token, results = ADDED[equation.primitive](self, token, equation, *map(value, equation.invars))
        else:
            inputs = list(dict.fromkeys(atom for atom in equation.invars if not isinstance(atom, core.Literal)))
            alone = core.Jaxpr((), inputs, equation.outvars, [equation], equation.effects, jaxpr.debug_info)
            token, results = interpret_known(self, alone, token, *map(value, inputs))
        values.update(zip(equation.outvars, results, strict=True))
    return token, [value(atom) for atom in jaxpr.outvars]


def read(self, token, ref: AbstractRef, key, transforms):
    """What a reference holds; the interpreter itself knows no transposed references."""
    plain = [transform for transform in transforms if not isinstance(transform, TransposeTransform)]
    aval = transform_type(plain, ref).inner_aval
    token, found = gpu_callbacks.call_get(
        token=token,
        result_shape_and_dtype=jax.ShapeDtypeStruct(aval.shape, aval.dtype),
        device_id=jnp.int32(self.device_info.device_id),
        grid_point_coords=self.grid_point_coords,
        thread_id=self.thread_id,
        allocation_key_as_array=key,
        transforms=tuple(plain),
    )
    for transform in transforms[len(plain) :]:
        found = found.transpose(transform.permutation)
    return token, found


def load(self, token, equation, key, *leaves):
    token, found = read(self, token, equation.invars[0].aval, key, equation.params["tree"].unflatten(leaves))
    return token, [found]


def layout_cast(self, token, equation, x):
    return token, [x]


def run_state(self, token, equation, *arguments):
    """Accumulators and registers become plain values; references to shared memory stay what they are."""
    plain = [not isinstance(atom.aval, AbstractRef) for atom in equation.invars]
    body = discharge.discharge_state(core.ClosedJaxpr(equation.params["jaxpr"], ()), should_discharge=plain)
    token, results = interpret(self, body.jaxpr, token, *arguments)
    results = iter(results)
    return token, [next(results) if p else argument for p, argument in zip(plain, arguments, strict=True)]


def wgmma(self, token, equation, total, a, b, *leaves):
    operands, leaves = [], list(leaves)
    for name, atom, operand in zip(("a", "b"), equation.invars[1:3], (a, b), strict=True):
        tree = equation.params[f"{name}_transforms_tree"]
        count = tree.num_leaves if tree else 0
        transforms, leaves = tree.unflatten(leaves[:count]) if tree else (), leaves[count:]
        if isinstance(atom.aval, AbstractRef):
            token, operand = read(self, token, atom.aval, operand, transforms)
        operands.append(operand)
    product = jnp.dot(*operands, precision="highest", preferred_element_type=jnp.float32)
    return token, [total + product]


ADDED = {
    gpu_core.layout_cast_p: layout_cast,
    primitives.load_p: load,
    primitives.wgmma_p: wgmma,
    discharge.run_state_p: run_state,
}


lock, compiled = threading.Lock(), {}


def run_thread(jaxpr, constants, *arguments):
    """thread_map._run_jaxpr, which compiles the same program again for every warpgroup of every block."""
    with lock:
        if jaxpr not in compiled:
            run = jax.jit(lambda constants, *arguments: core.eval_jaxpr(jaxpr, constants, *arguments))
            compiled[jaxpr] = run.lower(constants, *arguments).compile()
    compiled[jaxpr](constants, *arguments)


@contextlib.contextmanager
def gpu_interpreter():
    """Inside, kernels of plgpu.kernel run on this machine. Memory that nothing has written holds NaN."""
    reset_gpu_interpret_mode_state()
    with (
        params.force_gpu_interpret_mode(params.InterpretGPUParams(uninitialized_memory="nan")),
        mock.patch.object(JaxprInterpreter, "interpret", interpret),
        mock.patch.object(thread_map, "_run_jaxpr", run_thread),
    ):
        yield
