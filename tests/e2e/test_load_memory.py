"""Loading the real model takes its own size in memory and a constant: weights are streamed, never held twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.factories.native import probed, why_not

pytestmark = pytest.mark.model

SLACK = 500 * 2**20  # of which importing torch takes about half
SCRIPT = """
import sys
from pathlib import Path

from proa.loading.build import build
from proa.loading.progress import Silent
from tests.factories.headers import planned
from tests.factories.native import native_plan, probed

path, dtype, backend = sys.argv[1:]
if backend == "native":
    found = probed()
    built = build(native_plan(Path(path), found, dtype=dtype, quantization="none"), Silent(), found.library, None)
else:
    built = build(planned(Path(path), dtype=dtype).target, Silent(), None, None)
status = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
print(built.model.weights_bytes(), peak)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_memory_of_loading_is_the_weights_and_a_constant(dtype: str, backend: str, smollm2: Path) -> None:
    if backend == "native" and (why := why_not(probed())):
        pytest.skip(why)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(smollm2), dtype, backend],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    resident, peak = map(int, done.stdout.split())
    assert resident > 200 * 2**20
    assert peak <= resident + SLACK
