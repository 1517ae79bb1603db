"""The bits of theta do not depend on the CPU's vector instructions, on the C library's choice of functions, on threads, or on
whether numba's kernels or torch compute."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.bits import hashes

# Without the CPU's newer instructions torch takes other code, and so does glibc for exp, log and pow.
PLAIN = {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA,-FMA4,-AVX2"}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
TORCH = {"EDIT_KERNELS": "torch"}
KERNELS = {"EDIT_KERNELS": "numba"}
KERNELS_SSE2 = {"EDIT_KERNELS": "numba", "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")


@pytest.fixture(scope="module")
def here() -> dict[str, str]:
    return hashes()


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param(PLAIN | TORCH, id="plain, 1 thread"),
        pytest.param(AVX2 | TORCH, id="avx2, 2 threads", marks=pytest.mark.exhaustive),
        pytest.param(KERNELS, id="kernels", marks=[needs_numba, pytest.mark.exhaustive]),
        pytest.param(PLAIN | KERNELS_SSE2, id="plain, kernels", marks=[needs_numba, pytest.mark.exhaustive]),
    ],
)
def test_every_result_has_the_bits_that_it_has_here(environment: dict[str, str], here: dict[str, str], tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.bits"],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    there = json.loads(run.stdout)
    assert [name for name in here if there[name] != here[name]] == []
