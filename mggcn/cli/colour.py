"""Colours of what commands print: on a terminal alone, unless the environment says otherwise."""

from __future__ import annotations

import os
from typing import Final, Literal, TextIO

CODES: Final = {"red": "31", "green": "32", "bold": "1"}


def painted(text: str, colour: Literal["red", "green", "bold"], stream: TextIO) -> str:
    """Return a text with colours if the stream shows them."""
    return f"\x1b[{CODES[colour]}m{text}\x1b[0m" if has_colours(stream) else text


def has_colours(stream: TextIO) -> bool:
    """Whether a stream shows colours: not with NO_COLOR, always with FORCE_COLOR or CLICOLOR_FORCE, else on terminals."""
    if os.environ.get("NO_COLOR"):
        return False
    if any(os.environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return os.environ.get("TERM") != "dumb" and stream.isatty()
