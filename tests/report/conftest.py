"""A figure in the hands of a test instead of a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that draws and hands back the figure instead of saving it."""

    def draw(module: ModuleType, function: Callable[..., object], what: object) -> Any:
        figures: list[Any] = []
        monkeypatch.setattr(module, "save", lambda figure, path: figures.append(figure))
        function(what, Path("unused.png"))
        figures[0].canvas.draw()
        return figures[0]

    return draw
