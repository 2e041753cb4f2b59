"""Changes of bytes that a fuzzer makes: bits, ranges, numbers, words of the format, parts of another input."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

NUMBERS = [b"0", b"-1", b"1", b"255", b"65536", b"2147483647", b"2147483648", b"4294967295", b"9223372036854775807"]
NUMBERS += [b"1e308", b"nan", b"-inf", b"0x10", b"1_0", b"1.5", b"99999999999999999999999", b"", b"'1'"]
WORDS = [
    b"\0",
    b"\n",
    b"\r\n",
    b"\xff",
    b"\xef\xbb\xbf",
    b",",
    b" ",
    b"\t",
    b"#",
    b"%",
    b'"',
    b"[",
    b"]",
    b"{",
    b"}",
    b"=",
]
WORDS += [
    b"shape",
    b"descr",
    b"'<i8'",
    b"'|O'",
    b"True",
    b"general",
    b"symmetric",
    b"pattern",
    b"null",
    b"../",
    b"..",
    b"(",
]


def mutate(content: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Return the content with one to five changes."""
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        place = rng.randrange(len(found) + 1)
        stop = min(len(found), place + rng.choice((1, 2, 4, 8, 64)))
        kind = rng.randrange(9)
        if kind <= 1 and place < len(found):
            found[place] ^= 1 << rng.randrange(8)
        elif kind == 2 and place < len(found):
            found[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 3:
            del found[place:stop]
        elif kind == 4:
            found[place:place] = found[place:stop] * rng.choice((1, 3, 50))
        elif kind == 5:
            found[place:place] = rng.choice(WORDS) * rng.choice((1, 1, 2, 300))
        elif kind == 6 and (numbers := list(re.finditer(rb"-?\d+", bytes(found)))):
            number = rng.choice(numbers)
            found[number.start() : number.end()] = rng.choice(NUMBERS)
        elif kind == 7:
            del found[place:]
        else:
            other = rng.choice(others)
            first = rng.randrange(len(other) + 1)
            found[place:stop] = other[first : first + rng.choice((4, 16, 256))]
    return bytes(found)
