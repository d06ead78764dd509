"""The import contracts hold, and each of them fails when it is broken on purpose."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT = Path(sys.executable).parent / "lint-imports"


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    command = [str(LINT), "--no-cache", "--config", str(root / ".importlinter")]
    return subprocess.run(
        command,
        cwd=root,
        env={"PYTHONPATH": str(root / "src"), "PATH": "/usr/bin:/bin"},
        text=True,
        capture_output=True,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".importlinter", tmp_path)
    return tmp_path


def test_the_contracts_hold(copy: Path) -> None:
    result = lint(copy)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("plan/decision.py", "import proa.runner.runner", "Layers point down"),
        ("engine/scheduler.py", "import torch", "Everything explain needs stays free of torch"),
        ("layers/attention.py", "import proa.plan.context", "Intent stops at the plan"),
        ("runner/runner.py", "import proa.config.intent", "Intent stops at the plan"),
        ("loading/apply.py", "import proa.config.intent", "Intent stops at the plan"),
        ("layers/moe.py", "import proa.config.intent", "Intent stops at the plan"),
        ("arch/nextn.py", "import proa.config.intent", "Intent stops at the plan"),
        ("kernels/bind.py", "import proa.config.intent", "Intent stops at the plan"),
        ("arch/families/llama.py", "import proa.arch.families.qwen3", "Families do not import each other"),
        ("speculative/drafters/ngram.py", "import proa.speculative.drafters.standalone", "Drafters do not import"),
        ("loading/apply.py", "import pickle", "No transformers, no pydantic, no pickle"),
        ("engine/tokenizer.py", "import transformers", "No transformers, no pydantic, no pickle"),
    ],
)
def test_a_violation_is_named(copy: Path, file: str, line: str, contract: str) -> None:
    with (copy / "src" / "proa" / file).open("a") as source:
        source.write(f"\n{line}\n")
    result = lint(copy)
    assert result.returncode != 0
    broken = [text for text in result.stdout.splitlines() if "BROKEN" in text]
    assert any(contract in text for text in broken), result.stdout


def test_a_folder_that_nobody_placed_is_named(copy: Path) -> None:
    (copy / "src" / "proa" / "misc").mkdir()
    (copy / "src" / "proa" / "misc" / "__init__.py").touch()
    result = lint(copy)
    assert result.returncode != 0
    assert "misc" in result.stdout
