"""Assertions on what the partitioner did, for tests and for CI.

Works with any test runner; the `pytest` plugin adds the fixture `spmd_golden` and `--spmd-update`.

Example:
    report = spmd.testing.assert_collectives(step, params, batch, none=["all-gather"])
    spmd.testing.assert_sharding(params, P("data", None))
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spmd.testing._assertions import assert_collectives as assert_collectives
    from spmd.testing._goldens import assert_golden as assert_golden, golden_text as golden_text
    from spmd.testing._shardings import assert_sharding as assert_sharding
    from spmd.testing._times import assert_time as assert_time

# The plugin lives in this package, and pytest imports it in every run of every project that has
# spmd installed: nothing may be loaded before it is used.
_HOMES = {
    "assert_collectives": "_assertions",
    "assert_golden": "_goldens",
    "assert_sharding": "_shardings",
    "assert_time": "_times",
    "golden_text": "_goldens",
}
__all__ = ["assert_collectives", "assert_golden", "assert_sharding", "assert_time", "golden_text"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'spmd.testing' has no attribute {name!r}")
    import importlib

    home = importlib.import_module(f"spmd.testing.{_HOMES[name]}")
    return globals().setdefault(name, getattr(home, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
