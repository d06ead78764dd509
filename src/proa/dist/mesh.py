"""The ranks that share one runner's weights, as a value. Owns no process group: until ranks exist it has size 1."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """`size` ranks of a tensor-parallel group, of which this is `rank`."""

    size: int
    rank: int

    def __post_init__(self) -> None:
        if (self.size, self.rank) != (1, 0):
            raise ValueError(f"a mesh of {self.size} ranks needs collectives, which do not exist yet")

    def split(self, extent: int) -> range:
        """The share of this rank in a dimension of `extent`."""
        part, rest = divmod(extent, self.size)
        if rest:
            raise ValueError(f"{extent} does not split over {self.size} ranks")
        return range(self.rank * part, (self.rank + 1) * part)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `partial`: with one rank, `partial` itself."""
        return partial


SINGLE = Mesh(size=1, rank=0)
