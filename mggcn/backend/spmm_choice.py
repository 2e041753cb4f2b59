"""Which variant of a sparse product runs, and the table of those that were measured: the same words on both devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

SpmmVariant = Literal["rows", "panels", "blocks"]


@dataclass(frozen=True, slots=True)
class SpmmChoice:
    """A variant of a sparse product: `panel` columns at a time (0: all), `blocks` ranges of the operand's rows, and how
    many entries `ahead` rows are fetched. A GPU's kernels know panels alone, which they call slices.
    """

    way: SpmmVariant = "rows"
    panel: int = 0
    blocks: int = 1
    ahead: int = 0
    reason: str = ""

    @property
    def text(self) -> str:
        """Describe the variant and its sizes in words."""
        sizes = {"rows": "", "panels": f" of {self.panel} columns", "blocks": f", {self.blocks}"}
        return f"{self.way}{sizes[self.way]}" + (f", {self.ahead} ahead" if self.ahead else "")


@dataclass(frozen=True, slots=True)
class SpmmKey:
    """A product in a table of choices.

    item: bytes of a stored number; summed: as for `choose_spmm`; pattern: a digest of all that the choice sees of a
    matrix, which tells a matrix from its transpose.
    """

    rows: int
    columns: int
    nnz: int
    width: int
    item: int
    summed: bool
    pattern: str


Choices = Mapping[SpmmKey, SpmmChoice]
"""What was measured to be the fastest."""
NO_CHOICES: Choices = MappingProxyType({})
