"""What a compiled program does on each device, counted from its optimised HLO: matrix products and collectives.

The compiler's own totals count the body of a loop once. Here a loop counts as often as it runs, where the compiler
knows that; loops of unknown length count once and are reported.
"""

from __future__ import annotations

import collections
import math
import re
from dataclasses import dataclass, field

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "f32": 4}
ITEM_BYTES |= {"f64": 8, "s64": 8, "u64": 8}

_OPERATION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|bf16|[fsu]\d+)\[([\d,]*)\]")


@dataclass
class Work:
    """Of one device and one call. flops: of matrix products. Collectives by kind: how many, and the bytes of what they
    produce on this device. unknown_loops: loops counted once."""

    flops: float = 0.0
    count: collections.Counter = field(default_factory=collections.Counter)
    bytes: collections.Counter = field(default_factory=collections.Counter)
    unknown_loops: int = 0


@dataclass(frozen=True)
class _Operation:
    name: str
    type: str
    opcode: str
    rest: str


def work_of(hlo_text: str) -> Work:
    """Counts an optimised module, as `compiled.as_text()` gives it."""
    computations, entry = _parse(hlo_text)
    work = Work()
    _walk(computations, entry, 1, work)
    return work


def array_bytes(type_text: str) -> int:
    """Bytes of the arrays in a type such as "(bf16[8,4]{1,0}, f32[])"."""
    return sum(ITEM_BYTES.get(kind, 0) * _size(dims) for kind, dims in _ARRAY.findall(type_text))


def _parse(text: str) -> tuple[dict[str, list[_Operation]], str]:
    computations: dict[str, list[_Operation]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if line.endswith("{") and "->" in line and not line.startswith(" "):
            name = line.split()[1 if line.startswith("ENTRY") else 0].lstrip("%")
            computations[name] = current = []
            entry = name if line.startswith("ENTRY") else entry
        elif match := _OPERATION.match(line):
            current.append(_Operation(*match.groups()))
    return computations, entry


def _walk(computations: dict[str, list[_Operation]], name: str, times: int, work: Work) -> None:
    operations = computations.get(name, [])
    types = {operation.name: operation.type for operation in operations}
    for operation in operations:
        kind = operation.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            produced = _ARRAY.findall(operation.type)
            # A started collective's type holds what goes in and, last, what comes out.
            sizes = [ITEM_BYTES.get(item, 0) * _size(dims) for item, dims in produced if dims]
            out = sizes[-1:] if operation.opcode.endswith("-start") and kind != "all-reduce" else sizes
            work.count[kind] += times
            work.bytes[kind] += times * sum(out)
        elif operation.opcode in ("dot", "convolution"):
            work.flops += times * _product_flops(operation, types)
        elif operation.opcode == "while":
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', operation.rest)
            work.unknown_loops += trips is None
            body = re.search(r"body=%?([\w.\-]+)", operation.rest)
            if body:
                _walk(computations, body[1], times * int(trips[1] if trips else 1), work)
        else:
            for called in _called(operation):
                _walk(computations, called, times, work)


def _called(operation: _Operation) -> list[str]:
    """Computations that run when the operation does; of a choice all, so the count is an upper bound."""
    if branches := re.search(r"branch_computations=\{([^}]*)\}", operation.rest):
        return [name.strip().lstrip("%") for name in branches[1].split(",")]
    names = re.findall(r"(?:calls|true_computation|false_computation)=%?([\w.\-]+)", operation.rest)
    if operation.opcode == "call":
        names += re.findall(r"to_apply=%?([\w.\-]+)", operation.rest)
    return names


def _product_flops(operation: _Operation, types: dict[str, str]) -> float:
    outputs = sum(_size(dims) for _, dims in _ARRAY.findall(operation.type))
    left, right = re.findall(r"%?([\w.\-]+)", re.sub(r"\S+\[[\d,]*\]\S* ", "", operation.rest.split(")")[0]))[:2]
    if operation.opcode == "dot":
        dims = _dims(types.get(left, operation.rest))
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", operation.rest)
        inner = math.prod(dims[int(axis)] for axis in contracted[1].split(",") if axis) if contracted else 1
        return 2.0 * outputs * inner
    labels = re.search(r"dim_labels=\w+_(\w+)->", operation.rest)
    kernel = _dims(types.get(right, ""))
    if labels is None or len(labels[1]) != len(kernel):
        return 0.0
    return 2.0 * outputs * math.prod(size for label, size in zip(labels[1], kernel, strict=True) if label != "o")


def _dims(type_text: str) -> list[int]:
    match = _ARRAY.search(type_text)
    return [int(size) for size in match[2].split(",") if size] if match else []


def _size(dims: str) -> int:
    return math.prod(int(size) for size in dims.split(",") if size)
