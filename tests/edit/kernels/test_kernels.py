"""Kernels: the bits of torch from every loop, as Python and as numba compiles it; and how they are chosen."""

import functools
import importlib.util
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from edit import kernels
from edit.codecs import PIECE, codec
from edit.codecs.base import parts
from edit.codecs.int8 import BLOCK
from edit.errors import ConfigError
from edit.kernels import loops
from edit.merging.gram import gram
from edit.merging.merge import measure
from edit.merging.norms import norm
from edit.merging.outer_state import _largest
from tests.support.encoded import encode
from tests.support.exhaustive import examples

CODECS = ("int8", "int4", "int4:block=64", "int4:block=4096", "sdd:columns=32,rank=3")
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-38, 2.0**-100, 2.0**-101, 3e38, -3e38, 1.0]
ELEMENTS = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32), st.floats(-1, 1, width=32))
VECTORS = st.lists(ELEMENTS, min_size=1, max_size=3 * BLOCK + 5).map(lambda values: torch.tensor(values, dtype=torch.float32))
uses_computed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=examples(60))


def as_python() -> Any:
    """The loops as they are: numpy warns of what is not finite, torch does not."""

    def quiet(loop: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with np.errstate(all="ignore"):
                return loop(*arguments)

        return call

    return SimpleNamespace(**{name: quiet(getattr(loops, name)) for name in loops.SIGNATURES})


@pytest.fixture(scope="module")
def compiled() -> Any:
    numba = pytest.importorskip("numba")
    return SimpleNamespace(**kernels._compile(numba, kernels._cache_folder()[0]))  # a run of all tests has compiled them


@pytest.fixture(params=["python", "numba"])
def chosen(request: pytest.FixtureRequest) -> Any:
    return as_python() if request.param == "python" else request.getfixturevalue("compiled")


def by_both(chosen: Any, compute: Callable[[], list[Tensor]]) -> tuple[list[bytes], list[bytes]]:
    """What torch and the kernels compute, as bytes; any NaN is one NaN."""
    found = []
    before = kernels._compiled
    try:
        for one in (None, chosen):
            kernels._compiled = one
            found.append([_raw(tensor) for tensor in compute()])
    finally:
        kernels._compiled = before
    return found[0], found[1]


def _raw(tensor: Tensor) -> bytes:
    return (tensor.masked_fill(tensor.isnan(), math.nan) if tensor.is_floating_point() else tensor).numpy().tobytes()


def results(name: str, flat: Tensor) -> list[Tensor]:
    """All that a codec does with a vector."""
    encoded, sum_ = encode(name, flat), torch.linspace(-2, 2, flat.numel())
    one, residual, left = codec(name), flat.clone(), flat.clone()
    one.decode_add(encoded, sum_, 0.3)
    one.decode_add(encoded, residual, -1.0)
    for part, piece in zip(parts(flat.numel()), one.decode_pieces(encoded), strict=True):
        left[part].sub_(piece)
    assert torch.equal(residual.nan_to_num(), left.nan_to_num())
    size = torch.tensor([measure(encoded), norm(flat)], dtype=torch.float64)
    return [torch.frombuffer(encoded.data, dtype=torch.uint8), one.decode(encoded), sum_, residual, size, _largest_of(flat)]


def _largest_of(flat: Tensor) -> Tensor:
    return torch.tensor(_largest(flat) + 0.0, dtype=torch.float64)  # of zeros torch may find -0


@pytest.mark.covering
@pytest.mark.parametrize("name", CODECS)
@given(flat=VECTORS)
@uses_computed
def test_the_bits_are_those_of_torch(chosen: Any, name: str, flat: Tensor) -> None:
    by_torch, by_kernels = by_both(chosen, lambda: results(name, flat))
    assert by_torch == by_kernels


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("numel", [1, BLOCK - 1, BLOCK, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 4711])
def test_the_bits_are_those_of_torch_at_every_length_around_blocks_and_pieces(compiled: Any, name: str, numel: int) -> None:
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    by_torch, by_kernels = by_both(compiled, lambda: results(name, flat))
    assert by_torch == by_kernels


@pytest.mark.parametrize("name", CODECS)
def test_read_only_bytes_and_a_vector_with_gaps_are_taken_too(compiled: Any, name: str) -> None:
    flat, sum_ = torch.randn(3000, generator=torch.Generator().manual_seed(1)), torch.zeros(6000)

    def compute() -> list[Tensor]:
        encoded = encode(name, flat)
        readonly = type(encoded)(encoded.codec, encoded.numel, bytes(encoded.data))
        with_gaps = sum_.clone()[::2]
        codec(name).decode_add(readonly, with_gaps, 0.5)
        return [codec(name).decode(readonly), with_gaps]

    by_torch, by_kernels = by_both(compiled, compute)
    assert by_torch == by_kernels


def test_the_compiled_loops_do_compute(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def counted(name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            called.append(name)
            return getattr(compiled, name)(*arguments)

        return call

    monkeypatch.setattr(kernels, "_compiled", SimpleNamespace(**{name: counted(name) for name in loops.SIGNATURES}))
    flat = torch.randn(2 * PIECE)
    for name in ("int8", "int4", "sdd"):
        results(name, flat)
    gram([iter([flat[:PIECE], flat[PIECE:]])], flat.numel())
    assert set(called) == set(loops.SIGNATURES)


# ---- the choice ----


class FakeNumba:
    """What `load` uses of numba; compiles nothing."""

    __version__ = "0"

    def __init__(self, **config: Any) -> None:
        self.config = SimpleNamespace(**({"CACHE_DIR": "", "DISABLE_JIT": 0} | config))
        self.cached: set[tuple[bool, str]] = set()

    def njit(self, signature: str, *, cache: bool, **_: Any) -> Callable[[Any], Any]:
        self.cached.add((cache, self.config.CACHE_DIR))
        return lambda loop: loop


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeNumba]:
    monkeypatch.setattr(kernels, "_compiled", None)
    monkeypatch.delenv("EDIT_KERNELS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    numba = FakeNumba()
    monkeypatch.setitem(sys.modules, "numba", numba)  # type: ignore[arg-type]
    return numba


def load() -> str:
    return kernels._load.__wrapped__()


def test_numba_is_taken_where_it_is_installed_with_a_cache_of_the_users_own(fake: FakeNumba, tmp_path: Path) -> None:
    folder = tmp_path / "edit" / "kernels"
    assert load() == f"kernels: numba 0, cached in {folder}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert fake.cached == {(True, str(folder))} and fake.config.CACHE_DIR == ""
    assert kernels.fast(torch.zeros(3)) is not None
    assert kernels.fast(torch.zeros(3), torch.zeros(6)[::2]) is None


def test_threads_that_load_at_once_compile_once(fake: FakeNumba, monkeypatch: pytest.MonkeyPatch) -> None:
    """numba's cache folder is one for the process: of two threads that set it, one compiled into the working folder."""
    monkeypatch.setattr(kernels, "_load", functools.cache(kernels._load.__wrapped__))
    together, made = threading.Barrier(4), kernels._compile
    calls: list[object] = []

    def compiled(*arguments: Any) -> Any:
        assert kernels._loading.locked(), "another thread could compile at the same time"
        calls.append(arguments)
        return made(*arguments)

    monkeypatch.setattr(kernels, "_compile", compiled)

    def one(_: int) -> str:
        together.wait()
        return kernels.load()

    with ThreadPoolExecutor(4) as threads:
        (said,) = set(threads.map(one, range(4)))
    assert said.startswith("kernels: numba 0") and len(calls) == 1 and fake.config.CACHE_DIR == ""


def test_numbas_own_setting_of_the_cache_is_kept(fake: FakeNumba) -> None:
    fake.config.CACHE_DIR = "/of/the/user"
    assert load() == "kernels: numba 0, cached in /of/the/user"
    assert fake.cached == {(True, "/of/the/user")}


def test_without_numba_torch_computes(fake: FakeNumba, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert load().startswith("kernels: torch (numba cannot be imported: ")
    assert kernels.fast(torch.zeros(3)) is None
    monkeypatch.setenv("EDIT_KERNELS", "numba")
    with pytest.raises(
        ConfigError, match=r"^EDIT_KERNELS = numba, but it cannot be imported \(.*\): pip install 'edit-localsgd\[fast\]'$"
    ):
        load()


def test_the_switch_turns_them_off(fake: FakeNumba, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDIT_KERNELS", "torch")
    assert load() == "kernels: torch (EDIT_KERNELS)" and kernels.fast() is None
    monkeypatch.setenv("EDIT_KERNELS", "cython")
    with pytest.raises(ConfigError, match=r"^EDIT_KERNELS = 'cython' must be torch or numba, or not set$"):
        load()


def test_loops_that_numba_is_told_not_to_compile_are_not_run_as_python(fake: FakeNumba) -> None:
    fake.config.DISABLE_JIT = 1
    assert load() == "kernels: torch (NUMBA_DISABLE_JIT)" and kernels.fast() is None


def test_no_cache_where_none_can_be_written_or_others_can(fake: FakeNumba, tmp_path: Path) -> None:
    folder = tmp_path / "edit" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o770)
    assert load() == f"kernels: numba 0, not cached: others can write to {folder}"
    folder.rmdir()
    folder.write_text("a file")
    assert load().startswith("kernels: numba 0, not cached: ") and fake.cached == {(False, "")}


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
def test_another_process_reads_what_one_has_compiled(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA", "EDIT"))}
    written = []
    for _ in range(2):
        code = "from edit import kernels; print(kernels.load())"
        call = [sys.executable, "-c", code]
        done = subprocess.run(
            call, env=environment | {"XDG_CACHE_HOME": str(tmp_path)}, capture_output=True, text=True, check=True
        )
        assert "cached in" in done.stdout and done.stderr == ""
        written.append({path: path.stat().st_mtime_ns for path in (tmp_path / "edit" / "kernels").rglob("*.nbc")})
    assert len(written[0]) == len(loops.SIGNATURES) and written[0] == written[1]
