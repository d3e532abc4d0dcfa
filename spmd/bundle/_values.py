"""Plain Python values, types of arrays, and constants, as JSON values and back."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd import _jax
from spmd.bundle._fields import Field, FormError

_DEEPEST = 100
_MOST = 1 << 20
_BUILTINS = {t.__name__: t for t in (bool, bytes, dict, float, int, list, set, str, tuple)}


class NotPlainError(Exception):
    """A value has no written form; its argument is the value."""


class NanError(NotPlainError):
    """A value is NaN: it could be written, but what is read would be equal to nothing."""


# Plain values


def encode_plain(value: Any) -> Any:
    """A value of Python's own kinds as JSON; subclasses are none of them.

    Raises:
        NotPlainError: It is something else, or holds something else.
        NanError: It is NaN, or holds NaN.
    """
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
    if isinstance(value, np.dtype) and value.name in DTYPES:
        return {"dtype": value.name}
    raise NotPlainError(value)


def decode_plain(field: Field, depth: int = 0) -> Any:
    """What :func:`encode_plain` was given.

    Raises:
        FormError: It wrote no such thing.
    """
    if depth > _DEEPEST:
        raise FormError(field.where, f"at most {_DEEPEST} levels", "more")
    if type(field.value) is not dict:
        return _decode_scalar(field)
    kind, inner = field.only()
    if kind == "float":
        return _decode_float(inner)
    if kind == "bytes":
        return _decode_bytes(inner)
    if kind in ("tuple", "list"):
        found = [decode_plain(f, depth + 1) for f in inner.items(_MOST)]
        return tuple(found) if kind == "tuple" else found
    if kind == "dict":
        pairs = [f.items(2, exactly=2) for f in inner.items(_MOST)]
        return {_decode_key(k, depth): decode_plain(v, depth + 1) for k, v in pairs}
    if kind == "type":
        return _BUILTINS[inner.one_of(*_BUILTINS)]
    if kind == "dtype":
        return DTYPES[inner.one_of(*DTYPES)]
    raise field.refuse("a plain value")


def _decode_scalar(field: Field) -> Any:
    if field.is_none or type(field.value) in (bool, str):
        return field.value
    return field.integer(-(1 << 63), (1 << 63) - 1)


def _decode_float(field: Field) -> float:
    try:
        return float.fromhex(field.string())
    except (ValueError, OverflowError):
        raise field.refuse("a number in hexadecimal") from None


def _decode_bytes(field: Field) -> bytes:
    try:
        return bytes.fromhex(field.string())
    except ValueError:
        raise field.refuse("bytes in hexadecimal") from None


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
DTYPES = {
    name: np.dtype(getattr(jnp, "bool_" if name == "bool" else name))
    for name in _NAMES.split()
    if hasattr(jnp, "bool_" if name == "bool" else name)
}


def encode_dtype(dtype: Any) -> Any:
    """A dtype as JSON.

    Raises:
        NotPlainError: It is none of JAX's, or one of keys that nobody has registered.
    """
    if dtype == jax.dtypes.float0:
        return {"zero": "float0"}
    for name, keys in _jax.core.key_dtypes().items():
        if dtype == keys:
            return {"keys": name}
    if DTYPES.get(getattr(dtype, "name", "")) != dtype:
        raise NotPlainError(dtype)
    return dtype.name


def _decode_dtype(field: Field) -> Any:
    if type(field.value) is str:
        return DTYPES[field.one_of(*DTYPES)]
    kind, name = field.only()
    if kind == "zero":
        name.one_of("float0")
        return jax.dtypes.float0
    known = _jax.core.key_dtypes()
    if kind != "keys" or name.string() not in known:
        raise field.refuse("a dtype, or the name of random keys that are registered here")
    return known[name.string()]


def encode_aval(aval: Any) -> Any:
    """The type of an array as JSON: shape, dtype, weak, memory, the spec that it says.

    Raises:
        NotPlainError: It has a dtype that cannot be written.
    """
    spec = None if aval.sharding.mesh.empty else len(aval.sharding.spec)
    shape, dtype = [int(n) for n in aval.shape], encode_dtype(aval.dtype)
    return [shape, dtype, aval.weak_type, _jax.core.memory_space_of(aval), spec is not None]


def decode_aval(field: Field, abstract_mesh: Any) -> Any:
    """What :func:`encode_aval` was given.

    Args:
        field: Its place.
        abstract_mesh: The mesh of types that say one.

    Raises:
        FormError: It wrote no such thing.
    """
    dims, dtype, weak, memory, on_mesh = field.items(5, exactly=5)
    shape = tuple(d.integer(0, 1 << 48) for d in dims.items(64))
    if math.prod(shape) >= 1 << 60:
        raise dims.refuse("a shape of fewer elements")
    sharding = None
    if on_mesh.boolean():
        whole = jax.sharding.PartitionSpec(*[None] * len(shape))
        sharding = jax.sharding.NamedSharding(abstract_mesh, whole)
    return _jax.core.make_aval(
        shape,
        _decode_dtype(dtype),
        weak_type=weak.boolean(),
        memory=None if memory.is_none else memory.one_of(*_jax.core.MEMORY_SPACES),
        sharding=sharding,
    )


# Constants


def constant_bytes(value: Any) -> bytes:
    """The elements of a constant, in the order of its indices."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.ascontiguousarray(value).tobytes()


def constant_of(data: memoryview, aval: Any, where: str) -> Any:
    """The constant of a type whose elements are given.

    Raises:
        FormError: There are more or fewer.
    """
    shape, dtype, impl = aval.shape, aval.dtype, None
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        impl = dtype._impl
        shape, dtype = (*shape, *impl.key_shape), np.dtype(np.uint32)
    expected = math.prod(shape) * dtype.itemsize
    if expected != len(data):
        raise FormError(where, f"{expected} bytes", f"{len(data)} bytes")
    found: Any = np.frombuffer(data, dtype).reshape(shape)
    return found if impl is None else jax.random.wrap_key_data(found, impl=impl)
