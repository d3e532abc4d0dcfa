"""Training steps whose source a test copies, changes and imports again."""

import jax
import jax.numpy as jnp


def mlp(w, x):
    """A residual layer."""
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def mlp_step(w, x):
    """A gradient step of the layer."""
    grads = jax.grad(lambda w: jnp.mean(mlp(w, x) ** 2))(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)


def attention(x, w):
    """Attention of a sequence to itself."""
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, w[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", q, k))
    heads = jnp.einsum(
        "bhqk,bkhe->bqhe",
        weights,
        v,
    )
    return jnp.einsum("bqhe,hed->bqd", heads, w["out"])


def attention_step(w, x):
    """A gradient step of several such layers."""

    def loss(w):
        y, _ = jax.lax.scan(lambda x, w: (x + attention(x, w), None), x, w)
        return jnp.mean(y**2)

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value


def words_step(w, tokens):
    """A gradient step of an embedding, a layer, and the scores of the next word."""

    def loss(w):
        x = w["embed"][tokens[:, :-1]]
        scores = jax.nn.log_softmax(mlp(w, x) @ w["head"])
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))

    grads = jax.grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)


@jax.jit
def scaled(x, w):
    """A product with a residual, whose operands have other names than ASCII has."""
    größe = (x @ w).reshape(x.shape)
    return (größe
        .dot(w)) + x  # fmt: skip


def mapped_step(w, x):
    """A gradient step through functions that are mapped, jitted, recomputed and in a branch."""

    def one(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda: jnp.tanh(x @ w["up"]), lambda: x @ w["up"])

    @jax.checkpoint
    def layer(x, w):
        hidden = jax.vmap(one, in_axes=(0, None))(x, w)
        return scaled(hidden @ w["down"], w["square"])

    grads = jax.grad(lambda w: jnp.mean(layer(x, w) ** 2))(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)


def turned_step(w, x):
    """A gradient step of a layer that multiplies by a transposed product."""

    def loss(w):
        hidden = jnp.tanh((x @ w["up"]).T)
        mixed = (hidden @ x).T
        return jnp.mean((mixed @ w["down"]) ** 2)

    grads = jax.grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)
