"""Reads TensorBoard's event files by the definition of their format."""

import struct
from collections.abc import Iterator
from pathlib import Path


def event_scalars(folder: Path) -> dict[tuple[str, int], float]:
    """(name, step) → value, of all event files of a folder."""
    from tensorboardX.proto.event_pb2 import Event

    scalars = {}
    for path in sorted(folder.iterdir()):
        for record in _records(path.read_bytes()):
            event = Event.FromString(record)
            scalars |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
    return scalars


def _records(data: bytes) -> Iterator[bytes]:
    """A record: length (8 bytes), its checksum (4), the data, its checksum (4)."""
    position = 0
    while position < len(data):
        (length,) = struct.unpack_from("<Q", data, position)
        yield data[position + 12 : position + 12 + length]
        position += 12 + length + 4
