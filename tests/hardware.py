"""Marks for tests that need what not every machine has, and what XLA is started with."""

import importlib.metadata
import importlib.util
import os

import pytest

#: `.ci/run` installs both compilers with the extra `test`: to lack one there is a failure, no skip.
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None or "CI" in os.environ
WITHOUT_LIBTPU = "libtpu, which compiles for TPUs, is not installed: pip install 'spmd[tpu]'"

needs_libtpu = pytest.mark.skipif(not HAS_LIBTPU, reason=WITHOUT_LIBTPU)

HAS_CUDA = importlib.util.find_spec("jax_cuda13_plugin") is not None or "CI" in os.environ
WITHOUT_CUDA = "the compiler for GPUs is not installed: pip install 'spmd[gpu]'"

# Without that plugin nothing compiles for GPUs; in CI it is there, and no test is skipped so.
needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason=WITHOUT_CUDA)


def require_cuda():
    """Skips the test that calls it where programs for GPUs cannot be compiled: never in CI."""
    if not HAS_CUDA:  # on a machine without that plugin there is nothing to compile with
        pytest.skip(WITHOUT_CUDA)


def require_libtpu():
    """Skips the test that calls it where programs for TPUs cannot be compiled."""
    if not HAS_LIBTPU:
        pytest.skip(WITHOUT_LIBTPU)


#: Before jaxlib 0.11 XLA can do without its emitters of fusions, and under `xla_flags` it does.
#: A test that needs them, as users have them, says `lowered.compile(EMITTERS)`.
CAN_LEAVE_EMITTERS = importlib.metadata.version("jaxlib").startswith("0.10.")
EMITTERS = {"xla_cpu_use_fusion_emitters": True} if CAN_LEAVE_EMITTERS else {}


def xla_flags(devices=8):
    """What XLA starts virtual CPU devices with, to make the same partitioned programs faster.

    LLVM's optimizations take a quarter of a compilation, and emitters of fusions up to 3 quarters.
    With `SPMD_TEST_EMITTERS` in the environment they stay; `.ci/nightly` runs some tests so.
    """
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    if CAN_LEAVE_EMITTERS and "SPMD_TEST_EMITTERS" not in os.environ:
        flags += " --xla_cpu_use_fusion_emitters=false"
    return flags


def environment(devices=8):
    """Of a process of its own, with so many virtual CPU devices."""
    kept = {name: value for name, value in os.environ.items() if name != "NPROC"}  # set at import
    return {**kept, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(devices)}
