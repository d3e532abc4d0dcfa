"""A report before compilation, by the passes of Shardy alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import math
from typing import Any

from jax.sharding import AbstractMesh

from spmd import _jax, stages
from spmd.errors import Failure, ReportError, explain
from spmd.inspection.compile.program import COMPILED, check_lowered, entered, lower, stage_of
from spmd.inspection.compile.report import versions
from spmd.inspection.compile.timed import (
    Asked,
    asked,
    links_of,
    slice_of,
    time_of_prediction,
    with_model_flops,
)
from spmd.inspection.records.report import Cost, Report
from spmd.inspection.records.time import Time
from spmd.inspection.shardy import passes, pipeline
from spmd.inspection.shardy.exchanges import Exchanges, read
from spmd.inspection.shardy.flops import Work, device_work
from spmd.inspection.shardy.propagation import propagate
from spmd.inspection.shardy.targets import target_of
from spmd.inspection.shardy.targets.sums import is_placed_by_shardy
from spmd.inspection.shardy.why import function_of, origins_later
from spmd.inspection.timing.chips import Chip, chip_of, platform_of

PASSES = (
    pipeline.PROPAGATION,
    pipeline.RESHARDS,
    "func.func(sdy-reshard-to-collectives)",
)
"""Those after which a module has every exchange that its shardings demand."""


def preview(
    f: Any,
    /,
    *args: Any,
    mesh: Any = None,
    chip: Any = None,
    model_flops: float | None = None,
    **kwargs: Any,
) -> Report:
    """Predict the collectives of a function without compiling it.

    Shardy propagates the shardings and makes every exchange explicit that they demand. Those are
    changed by the rules that are known of the compiler of the mesh's devices, or of the chip that
    is named, for CPU and TPU: `Report.prediction` says which. What else the compiler does is not in
    it: it combines and moves exchanges, and replaces some by others.

    Args:
        f: a function of `spmd.pjit` or `jax.jit`, or what one of them was traced or lowered to.
        *args: what the function is called with; none for a stage.
        mesh: the mesh to lower for; by default the current one or the function's own.
        chip: that the program is to run on, where the mesh has other devices, such as CPUs: the
            exchanges are those of its compiler, and `Report.time` uses its figures. As `report`
            takes it.
        model_flops: of one call on all devices, for the MFU, as `report` takes it.
        **kwargs: keyword arguments of the call.

    Returns:
        A report with `predicted` True: collectives with their lines, axes, bytes and executions.
        Its cost is zero and its memory None, since only a compiled program has them. Its time is
        that of the products, as the annotations split them, and of the exchanges, one after the
        other.

    Raises:
        ReportError: this jaxlib lacks the passes of Shardy, `f` is compiled already, or meshes of
            it give an axis several sizes.
        TypeError: `f` cannot be lowered.
        RuntimeError: the program is for another mesh.

    Example:
        print(spmd.preview(step, state, batch))
    """
    subject = "preview"
    wish = asked(chip, model_flops, subject=subject)
    f = stage_of(f)
    if isinstance(f, COMPILED):
        failure = Failure(
            what="is for what is not compiled yet",
            got=f"{type(f).__module__}.{type(f).__name__}",
            fix="report(compiled), which says what the program does",
            error=ReportError,
        )
        raise explain(subject, [failure])
    with entered(mesh):
        lowered = lower(f, args, kwargs, subject=subject, verb="preview")
    count = passes.count_devices(passes.module_of(lowered, subject=subject))
    check_lowered(lowered, count, mesh, subject=subject)
    return previewed(lowered, wish, subject=subject)


def previewed(lowered: Any, wish: Asked, *, subject: str, products: bool = True) -> Report:
    """The prediction of a lowered function.

    Args:
        lowered: the function.
        wish: what the user says of its chip and time.
        subject: the first words of a message.
        products: whether the time is of its products too, and not of exchanges alone.

    Raises:
        ReportError: as `preview` says.
    """
    module = passes.module_of(lowered, subject=subject)
    count = passes.count_devices(module)
    devices = _devices(lowered)
    backend = devices[0].platform if devices else "any backend"
    platform = platform_of(wish.chip) if wish.chip else backend
    kind = devices[0].device_kind if devices else ""
    chip = wish.chip or (chip_of(kind) if kind else None)
    own = chip is not None and is_placed_by_shardy(chip.name)
    done = pipeline.run(module, PASSES, subject=subject, own=own)
    with module.context:
        if names := passes.apart(done):
            # The passes leave it to the partitioner to go from one such mesh to another.
            axes = dict.fromkeys(name for _, name in names)
            failure = Failure(
                what="cannot say what is sent between meshes that give an axis several sizes",
                got=f"several sizes of {', '.join(map(repr, axes))}",
                fix="compile it, and see its report",
                error=ReportError,
            )
            raise explain(subject, [failure])
        sizes = passes.axis_sizes(done)
        links = links_of(chip, devices, sizes)[0] if chip else None
        found = read(done, platform, chip.name if chip else "", slice_of(chip, links))
        return Report(
            name=function_of(passes.name_of(module)),
            backend=backend,
            device_kind=kind,
            stand_in=False,
            mesh=sizes,
            num_devices=count,
            versions=versions(),
            collectives=found.collectives,
            cost=Cost.zeros(),
            memory=None,
            predicted=True,
            prediction=target_of(platform).rules,
            time=_time(lowered, found, sizes, devices, wish, chip, products),
            _origins=origins_later(lowered, found.collectives, subject=subject),
        )


def _time(
    lowered: Any,
    found: Exchanges,
    sizes: Mapping[str, int],
    devices: Sequence[Any],
    wish: Asked,
    chip: Chip | None,
    products: bool,
) -> Time | None:
    if chip is None:
        return None
    if not products:
        return time_of_prediction(found, sizes, devices, chip, Work())
    whole = propagate(passes.module_of(lowered, subject="preview"), subject="preview", steps=False)
    time = time_of_prediction(found, sizes, devices, chip, device_work(whole, chip))
    if time is None:
        return None
    return with_model_flops(time, lowered, wish, devices, math.prod(sizes.values()))


def _devices(lowered: Any) -> Sequence[Any]:
    """The devices that a program is for, as far as it says."""
    if not isinstance(lowered, stages.Lowered):
        return _jax.lowering.lowered_devices(lowered)
    return () if isinstance(lowered.mesh, AbstractMesh) else [*lowered.mesh.devices.flat]
