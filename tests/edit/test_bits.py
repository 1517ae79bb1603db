"""The bits of theta do not depend on the CPU's vector instructions, on the C library's choice of functions, or on threads."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.bits import hashes

# Without the CPU's newer instructions torch takes other code, and so does glibc for exp, log and pow.
PLAIN = {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA,-FMA4,-AVX2"}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}


@pytest.fixture(scope="module")
def here() -> dict[str, str]:
    return hashes()


@pytest.mark.parametrize("environment", [PLAIN, AVX2], ids=["plain, 1 thread", "avx2, 2 threads"])
def test_every_result_has_the_bits_that_it_has_here(environment: dict[str, str], here: dict[str, str]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.bits"], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    there = json.loads(run.stdout)
    assert [name for name in here if there[name] != here[name]] == []
