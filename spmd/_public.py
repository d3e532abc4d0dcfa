"""The public names of `spmd`, each from the file that it lives in."""

import typing as _typing

from jax.sharding import NamedSharding as NamedSharding, PartitionSpec as PartitionSpec

from spmd._api import clear_caches as clear_caches, pjit as pjit
from spmd._constraint import with_sharding_constraint as with_sharding_constraint
from spmd._counts import Counts as Counts, counts as counts
from spmd._dispatch import (
    DonationWarning as DonationWarning,
    ImplicitReshardWarning as ImplicitReshardWarning,
)
from spmd._mesh import Mesh as Mesh, current_mesh as current_mesh, make_mesh as make_mesh
from spmd._spec import AUTO as AUTO, FROM_ARRAY as FROM_ARRAY
from spmd.errors import (
    ArgumentError as ArgumentError,
    BundleError as BundleError,
    DistributedError as DistributedError,
    DivergenceError as DivergenceError,
    DonatedArrayError as DonatedArrayError,
    MeshError as MeshError,
    OptionError as OptionError,
    OutOfMemoryError as OutOfMemoryError,
    PlanError as PlanError,
    PlanMemoryError as PlanMemoryError,
    RecoveryError as RecoveryError,
    ReportError as ReportError,
    ShardingError as ShardingError,
    SpecTypeError as SpecTypeError,
    SpmdError as SpmdError,
    StaticArgumentError as StaticArgumentError,
)
from spmd.stages import Compiled as Compiled, Lowered as Lowered, Traced as Traced

if _typing.TYPE_CHECKING:
    from spmd import (
        bundle as bundle,
        colocated_python as colocated_python,
        distributed as distributed,
        host_callback as host_callback,
    )
    from spmd._pmap import (
        AxisNameError as AxisNameError,
        DeviceCountError as DeviceCountError,
        SliceError as SliceError,
        device_put_replicated as device_put_replicated,
        device_put_sharded as device_put_sharded,
        pmap as pmap,
        shard_at as shard_at,
        unstack as unstack,
    )
    from spmd.bundle import load as load
    from spmd.inspection import (
        Diff as Diff,
        Fit as Fit,
        Picture as Picture,
        Pictures as Pictures,
        Report as Report,
        diff as diff,
        fits as fits,
        preview as preview,
        report as report,
        sweep as sweep,
        topology as topology,
        visualize as visualize,
        why as why,
    )
    from spmd.planner import Plan as Plan, plan as plan

#: Names of features, and where they live: the core never imports those files.
_FEATURES = {
    **dict.fromkeys(("Diff", "Fit", "Picture", "Pictures", "Report"), "spmd.inspection"),
    **dict.fromkeys(("diff", "fits"), "spmd.inspection"),
    **dict.fromkeys(("preview", "report", "sweep", "topology"), "spmd.inspection"),
    **dict.fromkeys(("visualize", "why"), "spmd.inspection"),
    **dict.fromkeys(("Plan", "plan"), "spmd.planner"),
    "bundle": "spmd.bundle",
    "load": "spmd.bundle",
    "colocated_python": "spmd.colocated_python",
    "distributed": "spmd.distributed",
    "host_callback": "spmd.host_callback",
    **dict.fromkeys(("AxisNameError", "DeviceCountError", "SliceError"), "spmd._pmap"),
    **dict.fromkeys(
        ("device_put_replicated", "device_put_sharded", "pmap", "shard_at", "unstack"), "spmd._pmap"
    ),
}

#: Modules that are attributes of `spmd`, and not what a star imports.
_MODULES = (
    *("errors", "inspection", "launch", "op_sharding", "partition_spec"),
    *("primitives", "sharding_spec", "stages", "testing"),
)

P = PartitionSpec
