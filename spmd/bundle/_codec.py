"""JSON values for what a program is made of, and back.

Plain values, types of arrays, constants, pytrees, meshes and shardings. Each is read as what it has
to be, or refused with its place. Classes of trees are named, and looked up among what this process
knows: nothing is imported, and nothing is run but what a class itself has registered to build it.
Devices are written by number, and may be others where they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
import math
import sys
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
import jax.tree_util as jtu
import numpy as np

from spmd import _jax
from spmd._mesh import show_mesh
from spmd.errors import show_value

_T = TypeVar("_T")

#: Elements of a list of the header.
MOST = 1 << 24
_MOST_PLAIN = 1 << 20
#: Of names and the like; flags and shown defaults are longer than identifiers.
_MOST_CHARACTERS = 1 << 16
_MOST_AXES = 64
_MOST_DEVICES = 1 << 22
_LARGEST_ID = 1 << 40
_DEEPEST = 100


@dataclass(eq=False)
class FormError(Exception):
    """A file is not what it has to be.

    Attributes:
        where: The place in the file, such as ``header.program.avals[3]``.
        expected: What had to stand there.
        got: What stands there.
    """

    where: str
    expected: str
    got: str


class NotPlainError(Exception):
    """A value has no written form; its argument is the value."""


class NanError(NotPlainError):
    """A value is NaN: it could be written, but what is read would be equal to nothing."""


class UnwritableError(Exception):
    """A node of a tree has no written form; its arguments are a class and the reason."""


@dataclass(slots=True)
class Field:
    """A JSON value and its place in the header; it raises `FormError` where it is another."""

    value: Any
    where: str

    def refuse(self, expected: str) -> FormError:
        """The error of a value that is not what it has to be."""
        return FormError(self.where, expected, show_value(self.value))

    def __getitem__(self, name: str) -> Field:
        if type(self.value) is not dict:
            raise self.refuse("an object")
        if name not in self.value:
            raise FormError(f"{self.where}.{name}", "a value", "none")
        return Field(self.value[name], f"{self.where}.{name}")

    def string(self) -> str:
        """A string of no unusual length."""
        if type(self.value) is not str or len(self.value) > _MOST_CHARACTERS:
            raise self.refuse("a string")
        return self.value

    def integer(self, low: int, high: int) -> int:
        """A whole number within bounds, both included."""
        if type(self.value) is not int or not low <= self.value <= high:
            raise self.refuse(f"a whole number from {low} to {high}")
        return self.value

    def boolean(self) -> bool:
        """True or false."""
        if type(self.value) is not bool:
            raise self.refuse("true or false")
        return self.value

    def items(self, most: int = MOST, exactly: int | None = None) -> list[Field]:
        """The elements of a list."""
        if type(self.value) is not list or len(self.value) > most:
            raise self.refuse(f"a list of at most {most} elements")
        if exactly is not None and len(self.value) != exactly:
            raise FormError(self.where, f"{exactly} elements", str(len(self.value)))
        return [Field(value, f"{self.where}[{i}]") for i, value in enumerate(self.value)]

    def row(self, count: int) -> list[Field]:
        """The elements of a list of so many."""
        return self.items(count, exactly=count)

    def strings(self) -> tuple[str, ...]:
        """A list of strings."""
        return tuple(f.string() for f in self.items(_MOST_CHARACTERS))

    def pairs(self) -> Iterator[tuple[str, Field]]:
        """Names and values of an object."""
        if type(self.value) is not dict:
            raise self.refuse("an object")
        for name in self.value:
            yield name, self[name]

    def only(self) -> tuple[str, Field]:
        """Name and value of an object that has one."""
        if type(self.value) is not dict or len(self.value) != 1:
            raise self.refuse("an object with one name")
        return next(self.pairs())

    def of(self, table: Sequence[_T]) -> _T:
        """The element of a table whose index stands here."""
        return table[self.integer(0, len(table) - 1)]

    def one_of(self, *choices: str) -> str:
        """One of some strings."""
        if self.value not in choices or type(self.value) is not str:
            raise self.refuse(" or ".join(map(repr, choices)))
        return self.value


Indices = dict[Any, int]
"""Values, each once, by the index at which a table has it."""


def index_in(table: Indices, value: Any) -> int:
    """The index of a value, which is added where it is new."""
    return table.setdefault(value, len(table))


# Plain values

_BUILTINS = {t.__name__: t for t in (bool, bytes, dict, float, int, list, set, str, tuple)}


def encode_plain(value: Any) -> Any:
    """A value of Python's own kinds; of anything else, subclasses included, a `NotPlainError`."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int and abs(value) < 1 << 63:
        return value
    if kind is float:
        if math.isnan(value):
            raise NanError(value)
        return {"float": value.hex()}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind in (tuple, list):
        return {kind.__name__: [encode_plain(v) for v in value]}
    if kind is dict:
        return {"dict": [[encode_plain(k), encode_plain(v)] for k, v in value.items()]}
    if isinstance(value, type) and _BUILTINS.get(value.__name__) is value:
        return {"type": value.__name__}
    if isinstance(value, np.dtype) and value.name in _DTYPES:
        return {"dtype": value.name}
    raise NotPlainError(value)


def decode_plain(field: Field, depth: int = 0) -> Any:
    """What `encode_plain` was given."""
    if depth > _DEEPEST:
        raise FormError(field.where, f"at most {_DEEPEST} levels", "more")
    if field.value is None or type(field.value) in (bool, str):
        return field.value
    if type(field.value) is not dict:
        return field.integer(-(1 << 63), (1 << 63) - 1)
    kind, inner = field.only()
    if kind == "float":
        return _from_hex(float.fromhex, inner, "a number")
    if kind == "bytes":
        return _from_hex(bytes.fromhex, inner, "bytes")
    if kind in ("tuple", "list"):
        found = [decode_plain(f, depth + 1) for f in inner.items(_MOST_PLAIN)]
        return tuple(found) if kind == "tuple" else found
    if kind == "dict":
        pairs = [f.row(2) for f in inner.items(_MOST_PLAIN)]
        return {_decode_key(k, depth): decode_plain(v, depth + 1) for k, v in pairs}
    if kind == "type":
        return _BUILTINS[inner.one_of(*_BUILTINS)]
    if kind == "dtype":
        return _DTYPES[inner.one_of(*_DTYPES)]
    raise field.refuse("a plain value")


def _from_hex(read: Callable[[str], _T], field: Field, what: str) -> _T:
    try:
        return read(field.string())
    except (ValueError, OverflowError):
        raise field.refuse(f"{what} in hexadecimal") from None


def _decode_key(field: Field, depth: int) -> Any:
    key = decode_plain(field, depth + 1)
    try:
        hash(key)
    except TypeError:
        raise field.refuse("a key, which has a hash") from None
    return key


# Types of arrays

_NAMES = """bool int2 int4 int8 int16 int32 int64 uint2 uint4 uint8 uint16 uint32 uint64
    float16 float32 float64 bfloat16 complex64 complex128 float4_e2m1fn float8_e3m4 float8_e4m3
    float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"""
#: The dtypes of JAX by name, but those of random keys.
_DTYPES = {n: np.dtype(getattr(jnp, n)) for n in _NAMES.split() if hasattr(jnp, n)}


def _encode_dtype(dtype: Any) -> Any:
    """A dtype of JAX, or one of keys that are registered."""
    if dtype == jax.dtypes.float0:
        return {"zero": "float0"}
    for name, keys in _jax.core.key_dtypes().items():
        if dtype == keys:
            return {"keys": name}
    if _DTYPES.get(getattr(dtype, "name", "")) != dtype:
        raise NotPlainError(dtype)
    return dtype.name


def _decode_dtype(field: Field) -> Any:
    if type(field.value) is str:
        return _DTYPES[field.one_of(*_DTYPES)]
    kind, name = field.only()
    if kind == "zero":
        name.one_of("float0")
        return jax.dtypes.float0
    known = _jax.core.key_dtypes()
    if kind != "keys" or name.string() not in known:
        raise field.refuse("a dtype, or the name of random keys that are registered here")
    return known[name.string()]


def encode_aval(aval: Any) -> Any:
    """Shape, dtype, whether it is weak, memory, and whether the type says a mesh."""
    shape, dtype = [int(n) for n in aval.shape], _encode_dtype(aval.dtype)
    on_mesh = not aval.sharding.mesh.empty
    return [shape, dtype, aval.weak_type, _jax.core.memory_space_of(aval), on_mesh]


def decode_aval(field: Field, abstract_mesh: Any) -> Any:
    """What `encode_aval` was given, with this mesh if the type says one."""
    dims, dtype, weak, memory, on_mesh = field.row(5)
    shape = tuple(d.integer(0, 1 << 48) for d in dims.items(64))
    if math.prod(shape) >= 1 << 60:
        raise dims.refuse("a shape of fewer elements")
    sharding = None
    if on_mesh.boolean():
        sharding = NamedSharding(abstract_mesh, PartitionSpec(*[None] * len(shape)))
    return _jax.core.make_aval(
        shape,
        _decode_dtype(dtype),
        weak_type=weak.boolean(),
        memory=None if memory.value is None else memory.one_of(*_jax.core.MEMORY_SPACES),
        sharding=sharding,
    )


# Constants


def constant_bytes(value: Any) -> bytes:
    """The elements of a constant, in the order of its indices."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.ascontiguousarray(value).tobytes()


def constant_of(data: memoryview, aval: Any, where: str) -> Any:
    """The constant of a type whose elements are given."""
    shape, dtype, impl = aval.shape, aval.dtype, None
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        impl = dtype._impl
        shape, dtype = (*shape, *impl.key_shape), np.dtype(np.uint32)
    expected = math.prod(shape) * dtype.itemsize
    if expected != len(data):
        raise FormError(where, f"{expected} bytes", f"{len(data)} bytes")
    found: Any = np.frombuffer(data, dtype).reshape(shape)
    return found if impl is None else jax.random.wrap_key_data(found, impl=impl)


# Trees

_LEAF = "*"
_leaf, _none = jtu.tree_structure(0), jtu.tree_structure(None)
#: Nodes with forms of their own here, which JAX registers too.
_BUILT_IN = (tuple, list, dict, type(None))


def encode_tree(tree: Any, depth: int = 0) -> Any:
    """The structure of a tree; of a node that has no written form, an `UnwritableError`."""
    if depth > _DEEPEST:
        raise UnwritableError("a tree", f"of more than {_DEEPEST} levels")
    if jtu.treedef_is_leaf(tree) and tree.num_leaves:
        return _LEAF
    kind, data = tree.node_data()
    children = [encode_tree(c, depth + 1) for c in tree.children()]
    if kind is type(None):
        return None
    if kind in (tuple, list):
        return {kind.__name__: children}
    if kind is dict:
        return {"dict": [_encode_beside(kind, list(data)), children]}
    module, qualname = name = [kind.__module__, kind.__qualname__]
    if _find_class(module, qualname) is not kind:
        raise UnwritableError(_show_class(kind), "which cannot be found by its name")
    if kind not in _jax.core.registered_nodes():
        return {"namedtuple": [name, [*kind._fields], children]}
    return {"custom": [name, _encode_beside(kind, data), children]}


def _encode_beside(kind: type, data: Any) -> Any:
    """What a node has beside its leaves."""
    try:
        return encode_plain(data)
    except NanError:
        raise
    except NotPlainError as error:
        reason = f"which holds a {type(error.args[0]).__qualname__} beside its leaves"
        raise UnwritableError(_show_class(kind), reason) from None


def _show_class(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _find_class(module: str, qualname: str) -> type | None:
    """The class of this name among the registered ones, else among those of loaded modules."""
    here = _in_modules(module, qualname)
    found = [
        t
        for t in _jax.core.registered_nodes()
        if (t.__module__, t.__qualname__) == (module, qualname)
        and here in (None, t)
        and t not in _BUILT_IN
    ]
    if len(found) == 1:
        return found[0]
    is_plain = here is not None and issubclass(here, tuple) and hasattr(here, "_fields")
    return here if is_plain else None


def _in_modules(module: str, qualname: str) -> type | None:
    """A class in a module that is loaded already; `getattr` could run code of the module."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) else None


def decode_tree(field: Field, depth: int = 0) -> Any:
    """What `encode_tree` was given, if its classes are registered here as they were there."""
    if depth > _DEEPEST:
        raise FormError(field.where, f"at most {_DEEPEST} levels", "more")
    if field.value == _LEAF:
        return _leaf
    if field.value is None:
        return _none
    kind, inner = field.only()
    if kind in ("tuple", "list"):
        return _build(_BUILTINS[kind], None, _children(inner, depth))
    if kind == "dict":
        keys, nodes = inner.row(2)
        return _build(dict, _decode_keys(keys, nodes), _children(nodes, depth))
    if kind not in ("namedtuple", "custom"):
        raise field.refuse("a node of a tree")
    name, data, nodes = inner.row(3)
    cls, children = _decode_class(name), _children(nodes, depth)
    if kind == "namedtuple":
        _check_namedtuple(cls, data, len(children))
        return _build(cls, None, children)
    plain = decode_plain(data)
    _check_custom(cls, plain, len(children), name.where)
    return _build(cls, plain, children)


def _build(kind: type, data: Any, children: list[Any]) -> Any:
    return jtu.PyTreeDef.from_node_data_and_children(jtu.default_registry, (kind, data), children)


def _children(field: Field, depth: int) -> list[Any]:
    return [decode_tree(f, depth + 1) for f in field.items()]


def _decode_keys(field: Field, nodes: Field) -> list[Any]:
    keys = decode_plain(field)
    try:
        distinct = len({*keys}) if type(keys) is list else -1
    except TypeError:  # no hash
        distinct = -1
    if distinct != len(nodes.items()):
        raise field.refuse("one key for each node of a dict")
    return keys


def _decode_class(field: Field) -> type:
    module, qualname = (f.string() for f in field.row(2))
    found = _find_class(module, qualname)
    if found is None:
        expected = f"the class {module}.{qualname}, imported and registered as a pytree node"
        raise FormError(field.where, expected, "no such class in this process")
    return found


def _check_namedtuple(cls: Any, field: Field, count: int) -> None:
    fields = field.strings()
    if cls in _jax.core.registered_nodes() or getattr(cls, "_fields", None) != fields:
        got = ", ".join(getattr(cls, "_fields", ())) or "none"
        raise FormError(field.where, f"the fields {', '.join(fields)} of {_show_class(cls)}", got)
    if count != len(fields):
        raise FormError(field.where, f"{count} fields", str(len(fields)))


def _check_custom(cls: type, data: Any, count: int, where: str) -> None:
    """Builds a node and takes it apart: JAX crashes on one with fewer children than it needs."""
    registered, shown = _jax.core.registered_nodes(), _show_class(cls)
    if cls not in registered:
        raise FormError(where, f"{shown}, registered as a pytree node", "not registered here")
    expected = f"{shown} with {count} children, as where it was written"
    try:
        node = registered[cls].from_iter(data, tuple(object() for _ in range(count)))
        found, again = jtu.default_registry.flatten_one_level(node)
        children, same = len([*found]), bool(again == data)
    except Exception as error:  # the class may raise whatever it likes
        raise FormError(where, expected, f"{type(error).__name__}: {error}"[:200]) from None
    if type(node) is not cls or children != count or not same:
        raise FormError(where, expected, f"{children} children, or other data beside them")


# Meshes


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The devices of a program.

    Attributes:
        ordered: In the order in which the program numbers them.
        by_id: The same, by the number that they had where the bundle was written.
    """

    ordered: tuple[Any, ...]
    by_id: Mapping[int, Any]

    def at(self, number: int, field: Field) -> Any:
        """The device of a number that stands in a field."""
        if number not in self.by_id:
            raise FormError(field.where, "devices of the program's mesh", f"device {number}")
        return self.by_id[number]

    def memory(self, field: Field) -> str | None:
        """A kind of memory that they have; None for the usual one."""
        kinds = [m.kind for m in self.ordered[0].addressable_memories()]
        return None if field.value is None else field.one_of(*kinds)


def encode_mesh(mesh: Any) -> Any:
    """Axes with sizes and types, and the numbers of the devices."""
    for name in mesh.axis_names:
        if type(name) is not str:
            raise NotPlainError(name)
    types = (t.name for t in mesh.axis_types)
    axes = [[n, s, t] for (n, s), t in zip(mesh.shape.items(), types, strict=True)]
    return {"axes": axes, "devices": [d.id for d in mesh.devices.flat]}


def decode_main_mesh(program: Field) -> tuple[dict[str, int], list[int]]:
    """The axis sizes of the mesh of a program, and the numbers of its devices in mesh order."""
    meshes = program["meshes"].items()
    if not meshes:
        raise program["meshes"].refuse("at least one mesh")
    sizes, _, ids = _decode_numbers(meshes[0])
    return sizes, ids


def _decode_numbers(field: Field) -> tuple[dict[str, int], tuple[AxisType, ...], list[int]]:
    """A mesh without its devices: axis sizes, axis types, and distinct numbers of devices."""
    sizes: dict[str, int] = {}
    types = []
    for axis in field["axes"].items(_MOST_AXES):
        name, size, kind = axis.row(3)
        if name.string() in sizes:
            raise name.refuse("a name for each axis")
        sizes[name.string()] = size.integer(1, _MOST_DEVICES)
        types.append(AxisType[kind.one_of("Auto", "Explicit", "Manual")])
    ids = [f.integer(0, _LARGEST_ID) for f in field["devices"].items(_MOST_DEVICES)]
    if len({*ids}) != len(ids) or len(ids) != math.prod(sizes.values()):
        raise FormError(field.where, f"distinct devices for {show_sizes(sizes)}", str(ids)[:200])
    return sizes, tuple(types), ids


def show_sizes(sizes: Mapping[str, int]) -> str:
    """``mesh data=4, model=2``."""
    return "mesh " + ", ".join(f"{n}={s}" for n, s in sizes.items())


def decode_mesh(field: Field, devices: Devices) -> Any:
    """A mesh over the devices at hand."""
    sizes, types, ids = _decode_numbers(field)
    found = np.array([devices.at(i, field) for i in ids], object)
    return jax.sharding.Mesh(found.reshape(tuple(sizes.values())), tuple(sizes), types)


# Shardings


def encode_sharding(sharding: Any, meshes: Indices) -> Any:
    """A sharding, its mesh in a table; of a kind that has no written form, a `NotPlainError`."""
    if isinstance(sharding, NamedSharding):
        index = index_in(meshes, sharding.mesh)
        return {"named": [index, _encode_spec(sharding.spec), sharding.memory_kind]}
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        return {"single": [device.id, sharding.memory_kind]}
    if tiling := _jax.dispatch.tiling_of(sharding):
        ids = [d.id for d in _jax.dispatch.device_order(sharding)]
        return {"tiled": [*tiling, ids, sharding.memory_kind]}
    raise NotPlainError(sharding)


def _encode_spec(spec: PartitionSpec) -> list[Any]:
    plain = all(entry is None or type(entry) in (str, tuple) for entry in spec)
    if spec.unreduced or spec.reduced or not plain:
        raise NotPlainError(spec)
    return [list(entry) if type(entry) is tuple else entry for entry in spec]


def decode_sharding(field: Field, meshes: Sequence[Any], devices: Devices) -> Any:
    """What `encode_sharding` was given, with meshes of a table and devices at hand."""
    kind, inner = field.only()
    if kind == "named":
        index, entries, memory = inner.row(3)
        mesh = index.of(meshes)
        spec = _decode_spec(entries, mesh)
        return NamedSharding(mesh, spec, memory_kind=devices.memory(memory))
    if kind == "single":
        number, memory = inner.row(2)
        device = devices.at(number.integer(0, _LARGEST_ID), number)
        return SingleDeviceSharding(device, memory_kind=devices.memory(memory))
    if kind == "tiled":
        return _decode_tiled(inner, devices)
    raise field.refuse("a sharding")


def _decode_spec(field: Field, mesh: Any) -> PartitionSpec:
    entries: list[Any] = []
    used: list[str] = []
    for entry in field.items(_MOST_AXES):
        names = entry.strings() if type(entry.value) is list else ()
        names = (entry.string(),) if type(entry.value) is str else names
        used += names
        entries.append(None if entry.value is None else names)
    if len({*used}) != len(used) or not {*used} <= {*mesh.axis_names}:
        raise field.refuse(f"a spec over {show_mesh(mesh)}, each axis once")
    return PartitionSpec(*entries)


def _decode_tiled(field: Field, devices: Devices) -> Any:
    tiles, order, last, ids, memory = field.row(5)
    count = len(devices.ordered)
    dims = [f.integer(1, count) for f in tiles.items(_MOST_AXES)]
    places = [f.integer(0, count - 1) for f in order.row(count)]
    if math.prod(dims) != count or len({*places}) != count:
        raise field.refuse(f"{count} tiles, one for each device")
    found = [devices.at(f.integer(0, _LARGEST_ID), f) for f in ids.row(count)]
    if len({*found}) != count:
        raise ids.refuse("each device once")
    return _jax.dispatch.tiled_sharding(found, dims, places, last.boolean(), devices.memory(memory))


def decode_fitting(field: Field, aval: Any, shardings: Sequence[Any]) -> Any:
    """A sharding of a table, if it splits no more dimensions than a value has, and evenly."""
    sharding = field.of(shardings)
    try:
        sharding.shard_shape(aval.shape)
        _jax.dispatch.op_sharding(sharding, aval.ndim)
    except (ValueError, IndexError) as error:  # JAX indexes the dimensions by the spec
        expected = f"a sharding of {_jax.core.short_aval(aval)}"
        raise FormError(field.where, expected, str(error)[:200]) from None
    return sharding
