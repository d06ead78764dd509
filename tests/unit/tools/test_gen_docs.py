"""The generated documents: complete, and a stale one is noticed with a diff."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from proa.config.fields import KEYS
from proa.env import VARIABLES

ROOT = Path(__file__).parents[3]


@pytest.fixture
def gen_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool, writing its pages below `tmp_path`."""
    spec = importlib.util.spec_from_file_location("gen_docs", ROOT / "tools" / "gen_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "DOCUMENTS", ((tmp_path / "docs" / "environment.md", module.environment_page),))
    return module


def test_the_page_in_the_repository_is_fresh(gen_docs: ModuleType) -> None:
    assert (ROOT / "docs" / "environment.md").read_text(encoding="utf-8") == gen_docs.environment_page()


def test_the_page_names_every_setting_and_every_variable(gen_docs: ModuleType) -> None:
    page = gen_docs.environment_page()
    for key in KEYS:
        if key.role is None:
            assert f"`{key.dotted}`" in page
            assert key.field.help in page
    assert all(f"`{variable.name}`" in page for variable in VARIABLES)


def test_check_passes_on_a_fresh_page_and_fails_with_a_diff_on_a_stale_one(
    gen_docs: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gen_docs.main(["--check"]) == 1
    assert gen_docs.main([]) == 0
    assert gen_docs.main(["--check"]) == 0
    page = tmp_path / "docs" / "environment.md"
    page.write_text(page.read_text(encoding="utf-8").replace("CPU threads", "threads of old"), encoding="utf-8")
    capsys.readouterr()
    assert gen_docs.main(["--check"]) == 1
    diff = capsys.readouterr().out
    assert "threads of old" in diff
    assert "\n+| `--threads`" in diff
    assert "threads of old" in page.read_text(encoding="utf-8")
