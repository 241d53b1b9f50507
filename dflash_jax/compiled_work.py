"""What a compiled program does on each device, counted from its optimised HLO: products, memory traffic, collectives.

The compiler's own totals count the body of a loop once. Here a loop counts as often as it runs, where its bound is a
constant; others count once. Of a choice all branches count. What a Pallas kernel computes inside is not seen.
"""

from __future__ import annotations

import collections
import functools
import math
import re
from dataclasses import dataclass, field

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "f32": 4}
ITEM_BYTES |= {"f64": 8, "s64": 8, "u64": 8}

# These move nothing, or what they move is counted where it is produced or used.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "iota"}
_FREE |= {"after-all", "partition-id", "replica-id", "opt-barrier"}

_OPERATION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|bf16|[fsu]\d+)\[([\d,]*)\]")
_PLACED_ARRAY = re.compile(r"\b\w+\[[\d,]*\](\{[^}]*\})?")  # with its layout and memory space
_ON_CHIP = re.compile(r"\b\w+\[[\d,]*\]\{[^}]*S\(1\)[^}]*\}")  # memory space 1: a TPU's vector memory


@dataclass
class Work:
    """Of one device and one call.

    flops: of matrix products outside kernels. bytes_moved: read and written by operations, fused ones as one.
    count, bytes: of collectives by kind, the bytes that go over a device's links. unknown_loops: counted once.
    """

    flops: float = 0.0
    bytes_moved: float = 0.0
    count: collections.Counter = field(default_factory=collections.Counter)
    bytes: collections.Counter = field(default_factory=collections.Counter)
    unknown_loops: int = 0


@dataclass(frozen=True)
class Operation:
    """One line of HLO: its type in text, what stands in its parentheses and behind them."""

    name: str
    type: str
    opcode: str
    rest: str
    root: bool

    @functools.cached_property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.split("), ")[0])

    def called(self, *fields: str) -> list[str]:
        """Names of the computations in these attributes."""
        return [name for field in fields for name in re.findall(rf"\b{field}=%?([\w.\-]+)", self.rest)]


def work_of(hlo_text: str) -> Work:
    """Counts an optimised module, as `compiled.as_text()` gives it."""
    module, work = Module(hlo_text), Work()
    module.walk(module.entry, 1, work)
    return work


def array_bytes(type_text: str) -> int:
    """Bytes of the arrays in a type such as "(bf16[8,4]{1,0}, f32[])", but for those on the chip."""
    return _any_bytes(_ON_CHIP.sub("", type_text))


def _any_bytes(type_text: str) -> int:
    return sum(ITEM_BYTES.get(kind, 0) * _size(dims) for kind, dims in _ARRAY.findall(type_text))


class Module:
    """The computations of a program by name, each a list of operations. entry: the name of the first."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Operation]] = {}
        self.entry, current = "", []
        for line in text.splitlines():
            if line.endswith("{") and "->" in line and not line.startswith(" "):
                name = line.split()[1 if line.startswith("ENTRY") else 0].lstrip("%")
                self.computations[name] = current = []
                self.entry = name if line.startswith("ENTRY") else self.entry
            elif match := _OPERATION.match(line):
                root, *parts = match.groups()
                current.append(Operation(*parts, root=bool(root)))

    def walk(self, name: str, times: int, work: Work, *, fused: bool = False) -> None:
        """Adds `times` runs of a computation. fused: its intermediate results stay on the chip."""
        operations = self.computations.get(name, [])
        types = {operation.name: operation.type for operation in operations}
        for operation in operations:
            kind = operation.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                work.count[kind] += times
                work.bytes[kind] += times * _over_links(operation, kind, types)
            elif operation.opcode in ("dot", "convolution"):
                work.flops += times * _product_flops(operation, types)
            if not fused and operation.opcode not in _FREE and not operation.opcode.endswith("-done"):
                work.bytes_moved += times * self._traffic(operation, types)
            if operation.opcode == "while":
                trips = self._trips(operation)
                work.unknown_loops += trips is None
                for body in operation.called("body"):
                    self.walk(body, times * (trips or 1), work, fused=fused)
            else:
                for called in _runs(operation):
                    self.walk(called, times, work, fused=fused or operation.opcode == "fusion")

    def _trips(self, loop: Operation) -> int | None:
        """How often a loop runs: as noted by the compiler, or by its condition `counter < constant`."""
        if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest):
            return int(noted[1])
        condition = self._by_name(*loop.called("condition"))
        root = next((operation for operation in condition.values() if operation.root), None)
        if root is None or root.opcode != "compare" or "direction=LT" not in root.rest:
            return None
        bounds = [bound for name in root.operands if (bound := _constant(condition, name)) is not None]
        counters = [op for name in root.operands if (op := condition.get(name)) and op.opcode == "get-tuple-element"]
        if not bounds or not counters:
            return None
        index = int(re.findall(r"index=(\d+)", counters[0].rest)[0])
        return math.ceil(bounds[0] / self._step(self._by_name(*loop.called("body")), index))

    def _by_name(self, computation: str) -> dict[str, Operation]:
        return {operation.name: operation for operation in self.computations.get(computation, [])}

    def _step(self, body: dict[str, Operation], index: int) -> int:
        """What a loop adds to its counter, which stands at this place of the tuple; unrolled loops add more than 1."""
        root = next((operation for operation in body.values() if operation.root), None)
        step, name = 0, root.operands[index] if root is not None and index < len(root.operands) else ""
        while (operation := body.get(name)) and operation.opcode in ("add", "copy"):
            added = [constant for other in operation.operands if (constant := _constant(body, other)) is not None]
            step += sum(added)
            name = next((other for other in operation.operands if _constant(body, other) is None), "")
        return max(step, 1)

    def _traffic(self, operation: Operation, types: dict[str, str]) -> int:
        """Bytes that an operation reads and writes; of an array that it slices or updates in place, only that part."""
        if operation.opcode in ("slice-start", "dynamic-slice-start"):  # its type holds what goes in, then the part
            arrays = [match[0] for match in _PLACED_ARRAY.finditer(operation.type)]
            source, part = arrays[0], arrays[len(operation.operands)]
            return array_bytes(part) + (_any_bytes(part) if array_bytes(source) else 0)
        if operation.opcode.endswith("-start"):  # its type holds source and destination
            return array_bytes(operation.type)
        if operation.opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * array_bytes(operation.type)
        if operation.opcode == "dynamic-update-slice":
            return 2 * array_bytes(types.get(operation.operands[1], ""))
        reads = [array_bytes(types.get(name, "")) for name in operation.operands]
        written = array_bytes(operation.type)
        if operation.opcode == "fusion":
            inner = self.computations.get(next(iter(operation.called("calls")), ""), [])
            reads = [min(read, self._part_read(inner, index, read)) for index, read in enumerate(reads)]
            written = self._part_written(inner, written)
        return sum(reads) + written

    def _part_read(self, inner: list[Operation], index: int, whole: int) -> int:
        """What a fused computation reads of its parameter: slices, if it does nothing else with it."""
        named = [op.name for op in inner if op.opcode == "parameter" and op.rest.startswith(f"{index})")]
        users = [op for op in inner if named and named[0] in op.operands]
        if users and all(op.opcode in ("dynamic-slice", "slice", "gather") for op in users):
            return sum(array_bytes(op.type) for op in users)
        if users and all(op.opcode == "dynamic-update-slice" and op.operands[0] == named[0] for op in users):
            return 0
        return whole

    def _part_written(self, inner: list[Operation], whole: int) -> int:
        types = {op.name: op.type for op in inner}
        root = next((op for op in inner if op.root), None)
        if root is not None and root.opcode == "dynamic-update-slice":
            return array_bytes(types.get(root.operands[1], ""))
        return whole


def _over_links(collective: Operation, kind: str, types: dict[str, str]) -> int:
    """Bytes that a collective takes over a device's links, on a ring of many: what a gathering one gives, what a
    reducing one takes; all-reduce does both."""
    taken = sum(_any_bytes(types.get(name, "")) for name in collective.operands)
    if kind in ("reduce-scatter", "all-reduce"):
        return (2 if kind == "all-reduce" else 1) * taken
    sizes = [ITEM_BYTES.get(item, 0) * _size(dims) for item, dims in _ARRAY.findall(collective.type) if dims]
    started = collective.opcode.endswith("-start")  # its type holds what goes in, too
    return sum(sizes) - taken if started and len(sizes) > len(collective.operands) else sum(sizes)


def _constant(operations: dict[str, Operation], name: str) -> int | None:
    operation = operations.get(name)
    if operation is None or operation.opcode != "constant" or not (value := re.match(r"-?\d+\)", operation.rest)):
        return None
    return int(value[0][:-1])


def _runs(operation: Operation) -> list[str]:
    """The computations that run when the operation does."""
    if branches := re.search(r"branch_computations=\{([^}]*)\}", operation.rest):
        return [name.strip().lstrip("%") for name in branches[1].split(",")]
    names = operation.called("calls", "true_computation", "false_computation")
    return names + (operation.called("to_apply") if operation.opcode == "call" else [])


def _product_flops(operation: Operation, types: dict[str, str]) -> float:
    outputs = sum(_size(dims) for _, dims in _ARRAY.findall(operation.type))
    left, right = (_dims(types.get(name, "")) for name in operation.operands[:2])
    if operation.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", operation.rest)
        axes = [int(axis) for axis in contracted[1].split(",") if axis] if contracted else []
        return 2.0 * outputs * math.prod(left[axis] for axis in axes)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", operation.rest)
    if labels is None:
        return 0.0
    of_left, of_right = dict(zip(labels[1], left, strict=True)), dict(zip(labels[2], right, strict=True))
    of_out = dict(zip(labels[3], _dims(operation.type), strict=True))
    spatial = [label for label in labels[3] if label.isdigit()]
    met = math.prod(_met(operation.rest, int(label), of_left[label], of_out[label]) for label in spatial)
    return 2.0 * of_out["b"] * of_out["f"] * of_right["i"] * met


def _met(rest: str, axis: int, inputs: int, outputs: int) -> int:
    """How many pairs of an output and a window place meet an input, along one axis. TPU programs write the batches of a
    product as windows that meet one input each, by dilation or by padding."""

    def field(name: str, default: str) -> str:
        match = re.search(rf"window={{[^}}]*\b{name}=([\dx_]+)", rest)
        return match[1].split("x")[axis] if match else default

    size, stride, dilated = int(field("size", "1")), int(field("stride", "1")), int(field("lhs_dilate", "1"))
    apart, padding = int(field("rhs_dilate", "1")), int(field("pad", "0_0").split("_")[0])
    places = (out * stride + place * apart - padding for out in range(outputs) for place in range(size))
    return sum(0 <= place <= (inputs - 1) * dilated and place % dilated == 0 for place in places)


def _dims(type_text: str) -> list[int]:
    match = _ARRAY.search(type_text)
    return [int(size) for size in match[2].split(",") if size] if match else []


def _size(dims: str) -> int:
    return math.prod(int(size) for size in dims.split(",") if size)
