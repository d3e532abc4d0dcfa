"""Programs to put into files, and files that are not what they say."""

import collections
import copy
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np

from spmd.bundle import _format

Pair = collections.namedtuple("Pair", "first second")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    """A registered dataclass with a value beside its leaves."""

    w: object
    b: object
    label: str = dataclasses.field(metadata={"static": True}, default="plain")


@jax.tree_util.register_pytree_node_class
class Box:
    """A node that has registered how it is built, with plain values beside its leaf."""

    def __init__(self, inside, note):
        self.inside = inside
        self.note = note

    def tree_flatten(self):
        """The leaf, and what stands beside it."""
        return (self.inside,), self.note

    @classmethod
    def tree_unflatten(cls, note, children):
        """The node again."""
        return cls(children[0], note)


NOTE = ("note", 2.5, (1, None, b"\x00"), {"k": [True]}, np.dtype("bfloat16"))


def everything(state, pair, key, small, unused, scale, times, *, bias):
    """A function of every kind of argument; `times` is static."""
    w = (state.w + pair.first["a"]["x"] * scale) * times
    total = (w.sum() + small[0].astype(jnp.float32).sum() + bias)[None]
    return {
        2: Box(State(w, state.b + 1, label="other"), NOTE),
        10: collections.OrderedDict(z=total, a=jax.random.split(key)),
        -1: [small[1], None, Pair((), small[2] * 2), small[3].astype(jnp.float32)],
    }


def everything_args():
    """Arguments of :func:`everything`, made anew: the first is donated."""
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    small = (
        jnp.arange(8, dtype=jnp.bfloat16),
        jnp.arange(8, dtype=jnp.int4) - 4,
        np.zeros((0, 4), np.int8),
        jnp.arange(8, dtype=jnp.float8_e4m3fn),
    )
    args = (
        State(jnp.asarray(x), jnp.asarray(x[0]), label="first"),
        Pair({"a": {"x": x / 3}}, None),
        jax.random.key(7),
        small,
        np.ones((3,), np.int32),
        2.0,
        3,
    )
    return args, {"bias": np.float32(0.5)}


def as_numpy(tree):
    """The leaves of a tree as NumPy arrays, keys as their data."""

    def one(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.asarray(x)

    return [one(x) for x in jax.tree.leaves(tree)]


def same_bits(a, b):
    """Whether two trees are the same to the last bit, shardings included."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.aval == y.aval
        assert x.sharding == y.sharding
    pairs = zip(as_numpy(a), as_numpy(b), strict=True)
    return all(x.tobytes() == y.tobytes() for x, y in pairs)


def header_of(data):
    """The JSON of a bundle."""
    return copy.deepcopy(_format.unpack(data).header.value)


def forged(data, header):
    """The bundle with another header, and a checksum that is right."""
    sections = [bytes(s) for s in _format.unpack(data).sections]
    return _format.pack(json.loads(json.dumps(header)), sections)
