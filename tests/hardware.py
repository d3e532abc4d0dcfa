"""Marks for tests that need a compiler or a device which not every machine has."""

import importlib.util
import os

import pytest

#: `.ci/run` installs libtpu with the extra `test`, so there its absence is a failure and no skip.
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None or "CI" in os.environ
WITHOUT_LIBTPU = "libtpu, which compiles for TPUs, is not installed: pip install 'spmd[tpu]'"

needs_libtpu = pytest.mark.skipif(not HAS_LIBTPU, reason=WITHOUT_LIBTPU)


def require_libtpu():
    """Skips the test that calls it where programs for TPUs cannot be compiled."""
    if not HAS_LIBTPU:
        pytest.skip(WITHOUT_LIBTPU)
