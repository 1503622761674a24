"""One collective as a rank has called it, and the record of 256 bytes that it is in the ledger."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from math import prod

__all__ = (
    "COMMON",
    "RECORD",
    "Call",
    "cut",
    "decode",
    "encode",
    "is_whole",
    "key_of",
    "number_of",
    "place_of",
    "texts_of",
    "what_of",
)

#: A record: a checksum of what follows; number, generation, sequence; name, dtype, shape, detail; group, site.
_CHECK = struct.Struct("<I")
_NUMBERS = struct.Struct("<4xqqq")
_WHAT = struct.Struct("<24s16s40s48s")
_TEXTS = struct.Struct("<48s48s")
_ALL = struct.Struct("<8xqqq24s16s40s48s48s48s")
_GROUP_BYTES, _SHAPE_BYTES, _SITE_BYTES = 48, 40, 48

#: Its size in bytes.
RECORD = _ALL.size
#: The part that two ranks are expected to have in common.
COMMON = slice(_CHECK.size + _NUMBERS.size, _CHECK.size + _NUMBERS.size + _WHAT.size)

_COUNTED = 1 << 63
_SEQUENCES = 0xFFFFFFFF


@dataclass(frozen=True)
class Call:
    """One collective, as a rank has called it. Texts that are too long for the ledger come back shortened."""

    name: str
    group: str = ""
    """Empty for the default group."""
    sequence: int = 0
    """From 1 on within its group; 0 for one that is not counted, as `send` and `recv`."""
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    """Without the module: "float32"."""
    detail: str = ""
    """What else the ranks must agree about: "SUM", "src=0"."""
    site: str = ""
    """File and line of the caller: "train.py:40"."""
    generation: int = 1
    """How many default groups the rank has had then; 0 where its numbers cannot be compared with its peers'."""


def key_of(place: int, sequence: int, number: int) -> int:
    """By what a record is found: never 0, the same in all ranks for the same call, else different but for chance."""
    return _COUNTED | place << 32 | sequence & _SEQUENCES if sequence else number & (_COUNTED - 1)


@lru_cache(maxsize=256)
def place_of(generation: int, group: str) -> int:
    """The part of the key that is the group's."""
    return zlib.crc32(b"%d %s" % (generation, group.encode("utf-8", "replace")))


def encode(number: int, generation: int, sequence: int, what: bytes, texts: bytes) -> bytes:
    """The record of a call, ``number`` counting all calls of its rank; its texts are made by `what_of`, `texts_of`."""
    body = b"".join((_NUMBERS.pack(number, generation, sequence), what, texts))
    return _CHECK.pack(zlib.crc32(body)) + body


# A program makes the same calls again and again.


@lru_cache(maxsize=1024)
def what_of(name: str, dtype: str | None, sizes: tuple[int, ...] | None, detail: str) -> bytes:
    """What two ranks are expected to have in common, as it is in a record (`COMMON`)."""
    shape = "" if sizes is None else ",".join(map(str, sizes)) or "()"
    if sizes is not None and len(shape) > _SHAPE_BYTES:
        shape = str(prod(sizes))
    return _WHAT.pack(*(text.encode("utf-8", "replace") for text in (name, dtype or "", shape, detail)))


@lru_cache(maxsize=1024)
def texts_of(group: str, site: str) -> bytes:
    """The rest of a record's texts."""
    # The line is at the end of a site.
    return _TEXTS.pack(group.encode("utf-8", "replace"), site.encode("utf-8", "replace")[-_SITE_BYTES:])


def decode(record: bytes) -> Call:
    """The call of a record that `is_whole`."""
    _, generation, sequence, *fields = _ALL.unpack(record)
    name, dtype, shape, detail, group, site = (field.rstrip(b"\0").decode("utf-8", "ignore") for field in fields)
    return Call(name, group, sequence, _dimensions(shape), dtype or None, detail, site, generation)


def _dimensions(text: str) -> tuple[int, ...] | None:
    if text == "()":
        return ()
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:  # there is none, or its sizes are symbols of a compiler
        return None


def cut(group: str) -> str:
    """A group's name as the ledger has it."""
    return group.encode("utf-8", "replace")[:_GROUP_BYTES].decode("utf-8", "ignore")


def is_whole(record: bytes) -> bool:
    """Whether its writer has finished it."""
    return bool(_CHECK.unpack_from(record)[0] == zlib.crc32(record[_CHECK.size :]))


def number_of(record: bytes) -> int:
    """How many calls the rank had begun with this one."""
    return int(_ALL.unpack_from(record)[0])
