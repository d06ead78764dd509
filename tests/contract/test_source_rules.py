"""Rules that no linter of ours knows, checked on the syntax tree of every source file."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "proa").rglob("*.py"))
MUTABLE_CALLS = frozenset({"dict", "list", "set", "defaultdict", "deque", "Counter", "OrderedDict"})


def top_level_containers(tree: ast.Module) -> Iterator[str]:
    """Names bound at module or class level to a mutable container."""
    scopes: list[ast.Module | ast.ClassDef] = [tree, *(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef))]
    for scope in scopes:
        for node in scope.body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = ast.unparse(target)
            if name == "__all__" or name == "__slots__":
                continue
            value = node.value
            called = isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in MUTABLE_CALLS
            if called or isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp):
                yield f"{name} (line {node.lineno})"


def forbidden_calls(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called == "object.__setattr__" or called in {"eval", "exec", "__import__"}:
                yield f"{called} (line {node.lineno})"


def raised_slugs(tree: ast.Module) -> Iterator[str]:
    """Literal slugs given to an error class: `XxxError("area/what", ...)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = ast.unparse(node.func).split(".")[-1]
            slug = node.args[0].value
            is_error = name.endswith(("Error", "Unavailable", "Exhausted", "Failed"))
            if is_error and isinstance(slug, str) and re.fullmatch(r"[a-z0-9-]+/[a-z0-9-]+", slug):
                yield slug


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_no_module_or_class_holds_a_mutable_container(path: Path) -> None:
    assert list(top_level_containers(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_no_frozen_value_is_written_to_and_no_text_is_run_as_code(path: Path) -> None:
    assert list(forbidden_calls(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if p.stat().st_size], ids=lambda p: str(p.relative_to(ROOT / "src"))
)
def test_every_module_opens_by_saying_what_it_owns(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "a module docstring of 1-5 lines"


def test_every_slug_has_a_line_in_the_error_page_and_a_test() -> None:
    slugs = {slug for path in SOURCES for slug in raised_slugs(ast.parse(path.read_text()))}
    page = (ROOT / "docs" / "errors.md").read_text()
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    undocumented = sorted(slug for slug in slugs if f"`{slug}`" not in page)
    untested = sorted(slug for slug in slugs if slug not in tests)
    stale = sorted(slug for slug in re.findall(r"^\| `([a-z0-9-]+/[a-z0-9-]+)`", page, re.M) if slug not in slugs)
    assert (undocumented, untested, stale) == ([], [], [])


def test_the_role_is_read_only_where_it_may_matter() -> None:
    """Layers, kernels, cache, sampling and engine do the same for both runners: they may not ask which.

    `engine/costs.py` is start-up: it files each runner's measured costs under the runner's name.
    """
    blind = ("layers", "kernels", "cache", "sampling", "engine", "arch", "checkpoint")
    asking = []
    for path in SOURCES:
        inside = path.relative_to(ROOT / "src" / "proa")
        if inside.parts[0] in blind and str(inside) != "engine/costs.py":
            tree = ast.parse(path.read_text())
            asking += [
                f"{path.name}:{n.lineno}" for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "role"
            ]
            asking += [f"{path.name}:{n.lineno}" for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == "Role"]
    assert asking == []


def intent_reads(tree: ast.Module) -> Iterator[str]:
    """Reads of what was asked: `decision.requested`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "requested":
            yield f"{ast.unparse(node)} (line {node.lineno})"


AFTER_THE_PLAN = ("layers", "loading", "cache", "sampling", "runner", "speculative", "engine", "kernels", "llm.py")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_nothing_after_the_plan_acts_on_what_was_asked(path: Path) -> None:
    if path.relative_to(ROOT / "src" / "proa").parts[0] in AFTER_THE_PLAN:
        assert list(intent_reads(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("CACHE = {}", top_level_containers),
        ("class A:\n    seen: list[int] = []", top_level_containers),
        ("SEEN = collections.defaultdict(list)", top_level_containers),
        ("object.__setattr__(plan, 'dtype', 1)", forbidden_calls),
        ("eval(text)", forbidden_calls),
        ("if contract.num_draft_tokens.requested.is_auto: pass", intent_reads),
        ("raise WeightError('weights/made-up', 'x')", raised_slugs),
    ],
)
def test_the_rules_above_find_what_they_forbid(code: str, found: Callable[[ast.Module], Iterator[str]]) -> None:
    assert list(found(ast.parse(code)))
