"""Reports made by hand, for tests of what reads them."""

from spmd.inspection import Collective, Cost, Report, Shape, Shapes, Source


def collective(kind="all-reduce", axes=("data",), dims=(256, 1024), **changes):
    """One all-reduce of 1 MiB in the forward pass, or what `changes` make of it."""
    shape = Shape(dtype="f32", dims=dims)
    fields = {
        "kind": kind,
        "mesh_axes": axes,
        "shapes": Shapes((shape,), (shape,)),
        "dtype": "f32",
        "payload_bytes": shape.nbytes,
        "wire_bytes": shape.nbytes * 3 // 2,
        "group_size": 4,
        "executions": 1,
        "source": Source(file="model.py", line=42, column=1, function="loss"),
        "direction": "forward",
        "op_name": "jit(step)/jvp(mlp)/dot_general",
        "is_async": False,
        "combined": 1,
    }
    return Collective(**{**fields, **changes})


def report(*collectives, **changes):
    """The report of a function `step` on the mesh data=4, model=2."""
    fields = {
        "name": "step",
        "backend": "cpu",
        "device_kind": "cpu",
        "stand_in": True,
        "mesh": {"data": 4, "model": 2},
        "num_devices": 8,
        "versions": {"spmd": "0.1.0", "jax": "0.10.2"},
        "collectives": collectives,
        "cost": Cost.zeros(),
        "memory": None,
    }
    return Report(**{**fields, **changes})


def joined(first, second, **changes):
    """Two collectives as the compiler combines them: in one, with the place of the first."""
    shapes = Shapes(
        first.shapes.operands + second.shapes.operands, first.shapes.results + second.shapes.results
    )
    return collective(
        first.kind,
        first.mesh_axes,
        **{
            "shapes": shapes,
            "payload_bytes": first.payload_bytes + second.payload_bytes,
            "wire_bytes": first.wire_bytes + second.wire_bytes,
            "executions": first.executions,
            "op_name": first.op_name,
            "direction": first.direction,
            "combined": 2,
            **changes,
        },
    )
