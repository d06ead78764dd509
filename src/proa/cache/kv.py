"""Keys and values of one runner: one pair of tensors per layer, allocated once. Owns rows, not who may use them
(cache/pages.py, cache/tables.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from proa.kernels.seam import LayerKV


class KVCache:
    """`num_pages` pages of `page_size` rows per layer; row = page * page_size + offset.

    Memory is reserved and not written: a row holds garbage until its request writes it, and kernels read written rows
    only (kernels/seam.py: View).
    """

    def __init__(
        self,
        shapes: Iterable[tuple[int, int]],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        """`shapes`: key/value heads and head size of each layer."""
        self.num_pages, self.page_size, self.dtype = num_pages, page_size, dtype
        rows = num_pages * page_size
        self.layers = tuple(
            LayerKV(
                keys=torch.empty((rows, heads, size), dtype=dtype, device=device),
                values=torch.empty((rows, heads, size), dtype=dtype, device=device),
                page_size=page_size,
            )
            for heads, size in shapes
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> Iterator[torch.Tensor]:
        for layer in self.layers:
            yield layer.keys
            yield layer.values
