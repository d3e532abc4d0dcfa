"""GPUs that are not there: what XLA's compiler is told of a kind, and what JAX loads it with.

The compiler is in JAX's plugin for CUDA. It needs no GPU, no driver and none of NVIDIA's libraries;
without a GPU it chooses between kernels by rules, and not by trying them.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import functools
import importlib
import importlib.util
import os
from typing import Any

from spmd import _jax
from spmd.inspection.timing.chips import CHIPS, chip_of, device_kind_of

KINDS = {"h100": 81_009 * 2**20, "h200": 143_223 * 2**20}
"""By the name that `topology` takes, bytes of memory that the driver leaves."""

# Of its memory JAX's runtime takes three quarters for programs, unless it is told otherwise.
_SHARE = 0.75

# What H100 and H200 have alike. Sources: NVIDIA's data sheets of both as SXM, and "CUDA C++
# Programming Guide", technical specifications of compute capability 9.0.
_HOPPER = f"""
cuda_compute_capability {{ major: 9 minor: 0 }}
core_count: 132
fpus_per_core: 128
clock_rate_ghz: 1.98
l2_cache_size: {50 * 2**20}
shared_memory_per_core: {228 * 2**10}
shared_memory_per_block: {48 * 2**10}
shared_memory_per_block_optin: {227 * 2**10}
registers_per_core_limit: 65536
registers_per_block_limit: 65536
threads_per_core_limit: 2048
threads_per_block_limit: 1024
threads_per_warp: 32
block_dim_limit_x: {2**31 - 1}
block_dim_limit_y: 65535
block_dim_limit_z: 65535
"""

# Of CUDA, for which JAX has plugins: one that brings the compiler, and one with what programs call.
_VERSIONS = (13, 12)


class MissingError(Exception):
    """JAX has no compiler for GPUs here."""


def limit_of(device_kind: str) -> int | None:
    """Bytes that JAX's runtime leaves to a program on a GPU, as it starts by default."""
    chip = chip_of(device_kind)
    return int(_SHARE * KINDS[chip.name]) if chip and chip.name in KINDS else None


@functools.lru_cache(maxsize=32)
def described(kind: str, count: int) -> list[Any]:
    """GPUs of one kind, in servers, each a process of its own.

    Raises:
        MissingError: JAX has no plugin for CUDA, or cannot load it.
    """
    per_box = min(count, CHIPS[kind].box)
    options = {"topology": f"1x{count // per_box}x{per_box}", "target_config": _config(kind)}
    with _unchecked():
        with contextlib.suppress(NotImplementedError):  # JAX has taken up no plugin
            return _devices(options)
        _take_up()
    try:
        return _devices(options)
    except NotImplementedError:
        raise MissingError from None


def _config(kind: str) -> str:
    """The compiler's description of its target, a message in the text form of protobuf."""
    chip = CHIPS[kind]
    own = f"device_memory_size: {KINDS[kind]} memory_bandwidth: {chip.hbm:.0f}"
    name = device_kind_of(chip)
    return f"""
gpu_device_info {{ {own} {_HOPPER} }}
platform_name: "CUDA"
device_description_str: "{name}"
"""


def _devices(options: dict[str, str]) -> list[Any]:
    from jax.experimental import topologies

    return list(topologies.get_topology_desc("", "cuda", **options).devices)


def _take_up() -> None:
    """Has JAX take up its plugin, which it left where it saw no driver when it started."""
    names = [f"jax_plugins.xla_cuda{n}" for n in _VERSIONS]
    plugin = next(filter(_is_there, names), None)
    if plugin is None or not any(_is_there(f"jax_cuda{n}_plugin") for n in _VERSIONS):
        raise MissingError
    importlib.import_module(plugin).initialize()


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
    """Keeps JAX's plugin from looking for libraries where there is no GPU that needs them."""
    name = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    if name in os.environ or _jax.mesh.has_gpu():
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _is_there(module: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):  # of the package around it
        return importlib.util.find_spec(module) is not None
    return False
