"""GPUs that are not there: what XLA's compiler is told of a kind, and what JAX loads it with.

The compiler is in JAX's plugin for CUDA. It needs no GPU, no driver and none of NVIDIA's libraries;
without a GPU it chooses between kernels by rules, and not by trying them.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import os
from typing import Any

from spmd import _jax

PER_BOX = 8
"""GPUs of a server, which a switch joins: of HGX and DGX systems."""

MOST = 65_536

# Of its memory JAX's runtime takes three quarters for programs, unless it is told otherwise.
_SHARE = 0.75


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A GPU, as data sheets have it and as the driver says it.

    Sources: NVIDIA's data sheets of H100 SXM and H200 SXM, and "CUDA C++ Programming Guide",
    technical specifications per compute capability.

    Attributes:
        device_kind: as JAX calls it, which is the name that the driver gives.
        memory: bytes that the driver leaves.
        bandwidth: bytes in a second.
        l2: bytes of the cache that all its multiprocessors share.
        clock: GHz, at most.
        processors: multiprocessors.
        capability: of computing, major and minor.
        per_processor: bytes of shared memory of a multiprocessor, and of one block at most.
    """

    device_kind: str
    memory: int
    bandwidth: int
    l2: int = 50 * 2**20
    clock: float = 1.98
    processors: int = 132
    capability: tuple[int, int] = (9, 0)
    per_processor: tuple[int, int] = (228 * 2**10, 227 * 2**10)

    def config(self) -> str:
        """The compiler's description of its target, a message in the text form of protobuf."""
        shared, per_block = self.per_processor
        major, minor = self.capability
        return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {self.processors}
  fpus_per_core: 128
  clock_rate_ghz: {self.clock}
  device_memory_size: {self.memory}
  memory_bandwidth: {self.bandwidth}
  l2_cache_size: {self.l2}
  shared_memory_per_core: {shared}
  shared_memory_per_block: {48 * 2**10}
  shared_memory_per_block_optin: {per_block}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  threads_per_warp: 32
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
device_description_str: "{self.device_kind}"
"""


#: By the name that `topology` takes.
KINDS = {
    "h100": _Kind(
        device_kind="NVIDIA H100 80GB HBM3", memory=81_009 * 2**20, bandwidth=3_350 * 10**9
    ),
    "h200": _Kind(device_kind="NVIDIA H200", memory=143_223 * 2**20, bandwidth=4_800 * 10**9),
}
_BY_DEVICE_KIND = {one.device_kind: one for one in KINDS.values()}


# Of CUDA, for which JAX has plugins: one that brings the compiler, and one with what programs call.
_VERSIONS = (13, 12)


class MissingError(Exception):
    """JAX has no compiler for GPUs here."""


def limit_of(device_kind: str) -> int | None:
    """Bytes that JAX's runtime leaves to a program on a GPU, as it starts by default."""
    known = _BY_DEVICE_KIND.get(device_kind)
    return int(_SHARE * known.memory) if known else None


@functools.lru_cache(maxsize=32)
def described(kind: str, count: int) -> list[Any]:
    """GPUs of one kind, in servers of `PER_BOX`, each a process of its own.

    Raises:
        MissingError: JAX has no plugin for CUDA, or cannot load it.
    """
    boxes, per_box = (1, count) if count <= PER_BOX else (count // PER_BOX, PER_BOX)
    options = {"topology": f"1x{boxes}x{per_box}", "target_config": KINDS[kind].config()}
    with _unchecked():
        with contextlib.suppress(NotImplementedError):  # JAX has taken up no plugin
            return _devices(options)
        _take_up()
    try:
        return _devices(options)
    except NotImplementedError:
        raise MissingError from None


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
