"""Differences between CuPy's versions of the NCCL binding: the type of an id, and the text of an error."""

from __future__ import annotations


def packed_id(unique_id: bytes | tuple[int, ...]) -> bytes:
    """Return an id as bytes that say its type: CuPy 14 gives bytes, CuPy 13 a tuple of signed bytes."""
    if isinstance(unique_id, bytes):
        return b"b" + unique_id
    return b"t" + bytes(value % 256 for value in unique_id)


def unpacked_id(text: bytes) -> bytes | tuple[int, ...]:
    """Invert `packed_id`."""
    if text[:1] == b"b":
        return text[1:]
    return tuple(value - 256 if value > 127 else value for value in text[1:])


def explained(error: Exception) -> str:
    """Return an error of the binding as text: it raises KeyError where its table of names lacks NCCL's status."""
    return f"status {error}" if isinstance(error, KeyError) else str(error)
