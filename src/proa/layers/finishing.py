"""Makes layers ready while a model is being loaded: each one as soon as all that it reads is filled.

Then few weights lie unpacked in memory at any time, and what is packed was written a moment ago.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from proa.kernels.kernel_set import KernelSet
from proa.layers.base import Layer


class Finishing:
    """Calls `Layer.finish` once for every layer of `model`: when the last of its parameters is filled, or at `rest`.

    `parameters` are those that will be filled, by name; a name goes when its parameter is, so that none is held after
    its layer gave it up.
    """

    def __init__(self, model: nn.Module, kernels: KernelSet, names: Collection[str]) -> None:
        self.parameters = dict(model.named_parameters())
        self._kernels = kernels
        self._waits: dict[Layer, set[str]] = {}
        self._readers: dict[str, list[Layer]] = {}
        filled = {id(parameter): name for name, parameter in self.parameters.items() if name in names}
        for layer in (module for module in model.modules() if isinstance(module, Layer)):
            self._waits[layer] = {filled[id(one)] for one in layer.reads() if id(one) in filled}
            for name in self._waits[layer]:
                self._readers.setdefault(name, []).append(layer)

    def filled(self, name: str) -> None:
        """The parameter has all its values. Layers that wait for nothing else become ready, in the model's order."""
        self.parameters.pop(name, None)
        for layer in self._readers.pop(name, ()):
            self._waits[layer].discard(name)
            if not self._waits[layer]:
                self._finish(layer)

    def rest(self) -> None:
        """Make ready what has not become so yet."""
        self.parameters.clear()
        for layer in tuple(self._waits):
            self._finish(layer)

    def _finish(self, layer: Layer) -> None:
        del self._waits[layer]
        layer.finish(self._kernels)
