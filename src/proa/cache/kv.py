"""The cached rows and states of one runner: tensors per layer, allocated once. Owns memory, not who may use it
(cache/pages.py, cache/tables.py; cache/state.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from proa.arch.blocks import AttentionSpec, MLASpec
from proa.arch.decoder import MixerSpec
from proa.arch.delta_blocks import DeltaSpec
from proa.kernels.delta import DeltaState
from proa.kernels.latent_seam import LatentKV
from proa.kernels.memory import empty
from proa.kernels.seam import LayerKV

LayerCache = LayerKV | LatentKV | DeltaState


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMemory:
    """What a delta layer gets: `slots` for states, `kept_rows` for inputs to be applied again (0: none are). `dtype` is
    the compute type, `delta_dtype` that of the delta state."""

    slots: int
    kept_rows: int
    dtype: torch.dtype
    delta_dtype: torch.dtype


class KVCache:
    """`num_pages` pages of `page_size` rows per attention layer; row = page * page_size + offset. State slots per delta
    layer.

    Memory is reserved and not written: a row or slot holds garbage until its request writes it, and kernels read what
    is written only (kernels/seam.py: View; kernels/delta.py: StateSlots).
    """

    def __init__(
        self,
        mixers: Iterable[MixerSpec],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        states: StateMemory | None = None,
    ) -> None:
        """`mixers`: that of each layer, which says what one row or state of it is."""
        self.num_pages, self.page_size, self.dtype = num_pages, page_size, dtype
        self._device, self._states = device, states
        self.layers = tuple(self._layer(mixer) for mixer in mixers)

    def _layer(self, mixer: MixerSpec) -> LayerCache:
        match mixer:
            case AttentionSpec():
                keys, values = (self._rows(mixer.num_kv_heads, mixer.head_dim) for _ in range(2))
                return LayerKV(keys=keys, values=values, page_size=self.page_size)
            case MLASpec():
                indexer = mixer.indexer if mixer.indexer is not None and mixer.indexer.is_full else None
                return LatentKV(
                    latent=self._rows(mixer.kv_rank + mixer.rope_dim),
                    index=None if indexer is None else self._rows(indexer.head_dim),
                    page_size=self.page_size,
                )
            case DeltaSpec():
                if self._states is None:
                    raise ValueError("a delta layer keeps a state per request, and there is no memory for states")
                return self._state(mixer, self._states)

    def _rows(self, *shape: int) -> torch.Tensor:
        return empty((self.num_pages * self.page_size, *shape), self.dtype, self._device)

    def _state(self, mixer: DeltaSpec, memory: StateMemory) -> DeltaState:
        def slots(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return empty((count, *shape), dtype, self._device)

        has_kept = memory.kept_rows > 0
        return DeltaState(
            conv=slots(memory.slots, mixer.conv_shape, memory.dtype),
            delta=slots(memory.slots, mixer.state_shape, memory.delta_dtype),
            kept=slots(memory.kept_rows, (mixer.kept_width,), memory.dtype) if has_kept else None,
        )

    @property
    def nbytes(self) -> int:
        """Of the pages."""
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def state_nbytes(self) -> int:
        """Of the states and of what is kept beside them."""
        parts = (part for state in self.states() for part in (state.conv, state.delta, state.kept))
        return sum(part.nbytes for part in parts if part is not None)

    def states(self) -> Iterator[DeltaState]:
        """Of the delta layers."""
        return (layer for layer in self.layers if isinstance(layer, DeltaState))

    def tensors(self) -> Iterator[torch.Tensor]:
        """Of the pages."""
        for layer in self.layers:
            match layer:
                case LayerKV():
                    yield from (layer.keys, layer.values)
                case LatentKV():
                    yield from (layer.latent,) if layer.index is None else (layer.latent, layer.index)
                case DeltaState():
                    pass
