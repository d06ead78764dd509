"""Native routing and experts: kernels/seam.py's MoEOps on the compiled library. Owns the calls, no arithmetic.

Hidden and expert widths are whole vectors of 16 (kernels/catalog.py requires it). A row's experts are summed in its own
order after every product is done, so the rows beside it do not enter: exact.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from proa.arch.blocks import SILU, ActivationSpec, GroupScore, RouterSpec, Score
from proa.kernels.native.abi import CExperts, CLinear, COp, CRouter, Form, Kind
from proa.kernels.native.ops import FORMS, PANEL, address, limit_of, whole
from proa.kernels.native.sink import Sink
from proa.kernels.seam import Blocks, Codes, PackedExperts, PackedRouter, Routed

MAX_GROUPS = 64  # of csrc/moe.h
SCORES: Mapping[Score, int] = MappingProxyType({Score.SOFTMAX: 0, Score.SIGMOID: 1, Score.SQRT_SOFTPLUS: 2})
BEST_OF_GROUP: Mapping[GroupScore, int] = MappingProxyType(
    {GroupScore.NONE: 0, GroupScore.MAX: 1, GroupScore.TOP2_SUM: 2}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRouter(PackedRouter):
    """`weight` holds whole panels of 16 experts, `bias` as many elements. `experts` is the number of real ones."""

    experts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeExperts(PackedExperts):
    """Slots of whole panels; those of gate and up take turns. `forms` are those of `gate_up` and `down`; `columns`: per
    scale, where there are scales."""

    forms: tuple[Form, Form]
    columns: int = 0

    def maps(self) -> tuple[CLinear, CLinear]:
        """`gate_up` and `down`, of all slots."""
        upper, lower = self.forms
        scales = (None, None) if self.scales is None else self.scales
        return (
            _linear(self.gate_up, upper, scales[0], 2 * self.width, self.hidden, self.columns),
            _linear(self.down, lower, scales[1], self.hidden, self.width, self.columns),
        )

    @property
    def is_quantised(self) -> bool:
        return torch.uint8 in (self.gate_up.dtype, self.down.dtype)


class NativeMoE:
    """MoEOps on the compiled library. `sink` says whether ops run or are recorded."""

    name = "native"

    def __init__(self, library: ctypes.CDLL, sink: Sink) -> None:
        self.library = library
        self.sink = sink

    def pack_router(
        self, weight: torch.Tensor, bias: torch.Tensor | None, table: torch.Tensor | None = None
    ) -> PackedRouter:
        experts, hidden = weight.shape
        panels = torch.empty((whole(experts), hidden), dtype=weight.dtype)
        self.library.proa_pack(FORMS[weight.dtype], weight.contiguous().data_ptr(), experts, hidden, panels.data_ptr())
        padded = None
        if bias is not None:
            padded = torch.zeros(len(panels))
            padded[:experts] = bias
        return NativeRouter(weight=panels, bias=padded, table=table, experts=experts)

    def pack_experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts:
        """The given tensors' own memory becomes the packed form, slot by slot."""
        slots, hidden, width = down.shape
        gate_up, down = gate_up.detach().contiguous(), down.detach().contiguous()
        for tensor, halves in ((gate_up, 2), (down, 1)):
            if tensor.shape[1] % (PANEL * halves):
                raise ValueError(f"experts of {tuple(tensor.shape)} are no whole panels of {PANEL}")
            self.library.proa_pack_slots(FORMS[tensor.dtype], tensor.data_ptr(), *tensor.shape, halves)
        forms = FORMS[gate_up.dtype], FORMS[down.dtype]
        return NativeExperts(gate_up=gate_up, down=down, slots=slots, width=width, hidden=hidden, forms=forms)

    def pack_expert_codes(self, gate_up: Codes, down: Codes, dtype: torch.dtype) -> PackedExperts:
        """As `pack_experts`, the scales' memory included."""
        if gate_up.columns != down.columns:
            raise ValueError(f"experts have scales per {gate_up.columns} and per {down.columns} columns")
        scales = gate_up.scales.detach()
        scales.copy_(scales.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))
        packed = self.pack_experts(gate_up.codes, down.codes)
        return NativeExperts(
            gate_up=packed.gate_up,
            down=packed.down,
            slots=packed.slots,
            width=packed.width,
            hidden=packed.hidden,
            forms=(Form.F8, Form.F8),
            scales=(scales, down.scales.detach()),
            columns=gate_up.columns,
        )

    def pack_expert_blocks(self, gate_up: Blocks, down: Blocks, dtype: torch.dtype) -> PackedExperts:
        slots, hidden, width = down.shape
        return NativeExperts(
            gate_up=self._block_panels(gate_up, halves=2),
            down=self._block_panels(down, halves=1),
            slots=slots,
            width=width,
            hidden=hidden,
            forms=(Form[gate_up.format.name], Form[down.format.name]),
        )

    def _block_panels(self, blocks: Blocks, *, halves: int) -> torch.Tensor:
        """uint8 [slots, out, bytes of a row in panels]."""
        (slots, out, size), form, row_bytes = blocks.shape, Form[blocks.format.name], blocks.data.shape[-1]
        if out % (PANEL * halves):
            raise ValueError(f"experts of {(slots, out, size)} are no whole panels of {PANEL}")
        panels = torch.empty((slots, out, self.library.proa_row_bytes(form, size)), dtype=torch.uint8)
        self.library.proa_pack_block_slots(
            form, blocks.data.data_ptr(), row_bytes, slots, out, size, halves, panels.data_ptr()
        )
        return panels

    def route(
        self,
        x: torch.Tensor,
        router: PackedRouter,
        spec: RouterSpec,
        top_k: int,
        shared: Sequence[int],
        shared_weight: float,
        gate: torch.Tensor | None,
        token_ids: torch.Tensor | None = None,
    ) -> Routed:
        if not isinstance(router, NativeRouter):
            raise TypeError("a router that another backend packed was given to a native op")
        rows, chosen = len(x), top_k + len(shared)
        slots = self.sink.empty((rows, chosen), torch.int32)
        weights = self.sink.empty((rows, chosen), torch.float32)
        scores = self.sink.empty((rows, 2, len(router.weight)), torch.float32)
        call = _router_call(router, spec, top_k, shared, shared_weight, _same_type(gate, x))
        op = COp(
            kind=Kind.ROUTE,
            a=x.data_ptr(),
            b=ctypes.addressof(call),
            out=slots.data_ptr(),
            tmp=weights.data_ptr(),
            scratch=scores.data_ptr(),
        )
        read = {} if router.table is None else {"token_ids": router.ids(token_ids)}
        self.sink.emit(x.dtype, op, rows, (call, router, gate), **read)
        return Routed(slots=slots, weights=weights)

    def experts(
        self,
        x: torch.Tensor,
        routed: Routed,
        packed: PackedExperts,
        *,
        scale: float,
        shared: torch.Tensor | None,
        gate: torch.Tensor | None,
        activation: ActivationSpec = SILU,
    ) -> torch.Tensor:
        if not isinstance(packed, NativeExperts):
            raise TypeError("experts that another backend packed were given to a native op")
        rows, chosen = routed.slots.shape
        out = self.sink.empty((rows, packed.hidden), x.dtype)
        results = self.sink.empty((rows * chosen, packed.hidden + packed.width), x.dtype)
        scratch = self.sink.empty((self._scratch_bytes(packed, rows * chosen),), torch.uint8)
        sizes = (packed.slots, packed.hidden, packed.width)
        call = CExperts(*packed.maps(), *sizes, address(_same_type(gate, x)), limit_of(activation))
        op = COp(
            kind=Kind.EXPERTS,
            n=chosen,
            f=scale,
            a=x.data_ptr(),
            b=ctypes.addressof(call),
            c=routed.slots.data_ptr(),
            d=routed.weights.data_ptr(),
            e=address(_same_type(shared, x)),
            out=out.data_ptr(),
            tmp=results.data_ptr(),
            scratch=scratch.data_ptr(),
        )
        self.sink.emit(x.dtype, op, rows, (call, packed, gate))
        return out

    def _scratch_bytes(self, packed: NativeExperts, entries: int) -> int:
        """Where entries went, and in the 64 bytes after that, their quantised rows."""
        places = 4 * (packed.slots + 1 + entries)
        if not packed.is_quantised:
            return places
        return places + 64 + self.library.proa_scratch_bytes(entries, max(packed.hidden, packed.width))


def _router_call(
    router: NativeRouter,
    spec: RouterSpec,
    top_k: int,
    shared: Sequence[int],
    shared_weight: float,
    gate: torch.Tensor | None,
) -> CRouter:
    first_shared = shared[0] if shared else 0
    if list(shared) != list(range(first_shared, first_shared + len(shared))):
        raise ValueError(f"shared slots {tuple(shared)} do not follow each other")
    if spec.num_groups > MAX_GROUPS:
        raise ValueError(f"a native router has at most {MAX_GROUPS} groups, not {spec.num_groups}")
    return CRouter(
        _linear(router.weight, FORMS[router.weight.dtype], None, router.experts, router.weight.shape[1], 0),
        address(router.bias),
        SCORES[spec.score],
        spec.num_groups,
        spec.top_groups,
        BEST_OF_GROUP[spec.group_score],
        spec.renormalise,
        top_k,
        len(shared),
        first_shared,
        spec.scale,
        shared_weight,
        address(gate),
        address(router.table),
    )


def _linear(
    weight: torch.Tensor, form: Form, scales: torch.Tensor | None, out: int, size: int, columns: int
) -> CLinear:
    return CLinear(weight.data_ptr(), None, form, out, size, address(scales), columns)


def _same_type(tensor: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """A second operand, which the library reads in the type of the first."""
    if tensor is not None and tensor.dtype != x.dtype:
        raise TypeError(f"an operand is {tensor.dtype} where the rows are {x.dtype}")
    return tensor
