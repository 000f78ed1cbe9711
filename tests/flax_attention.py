"""What the tests of the Flax modules share: a ragged paged loop, and attention in NumPy float64.

Letters: S steps, B rows, T prompt tokens, F features, H heads (of queries or of keys), D head_dim.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import h2o_jax
from h2o_jax import reference
from h2o_jax.rope import RopeScaling, RotaryEmbedding


@dataclasses.dataclass(frozen=True)
class Case:
    """A module and its policy.

    Attributes:
        group, num_kv_heads, head_dim, in_features, out_features: sizes.
        bias, qk_norm, rope: switches of the module; `rope` is the llama3 rule.
        policy, top_k, page_size: of the cache.
        dtype: of the module's computation.
    """

    group: int = 2
    num_kv_heads: int = 2
    head_dim: int = 8
    in_features: int = 20
    out_features: int = 12
    bias: bool = False
    qk_norm: bool | str = False
    rope: bool = False
    policy: str = "dense_attention"
    top_k: int = 0
    page_size: int = 4
    dtype: str | None = None

    @property
    def num_heads(self):
        return self.group * self.num_kv_heads

    @property
    def options(self):
        """The arguments that the constructors of both modules share."""
        rope = RotaryEmbedding(
            self.head_dim,
            theta=1000.0,
            scaling=RopeScaling("llama3", 4.0, 1.0, 4.0, original_max_position=64),
        )
        return dict(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            out_features=self.out_features,
            policy=self.get_policy(),
            use_qkv_bias=self.bias,
            use_out_bias=self.bias,
            qk_norm=self.qk_norm,
            rope=rope if self.rope else None,
            dtype=self.dtype,
        )

    def get_policy(self):
        budget = {"top_k": self.top_k, "reserved_bos": 1, "reserved_eos": 1} if self.top_k else {}
        return h2o_jax.get_policy(self.policy, **budget)

    def parameters(self, seed=0):
        """{part: {name: array}}, float32, no bias 0 and no norm weight 1."""
        rng = np.random.default_rng(seed)
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = {
            "q_proj": (self.in_features, queries),
            "k_proj": (self.in_features, keys),
            "v_proj": (self.in_features, keys),
            "o_proj": (queries, self.out_features),
        }
        out = {}
        for part, (rows, columns) in sizes.items():
            gain = 2.0 if part in ("q_proj", "k_proj") else 1.0  # attention far from uniform
            out[part] = {"kernel": rng.standard_normal((rows, columns)) * gain / np.sqrt(rows)}
            if self.bias:
                out[part]["bias"] = 0.5 * rng.standard_normal(columns)
        if self.qk_norm:
            for part in ("q_norm", "k_norm"):
                out[part] = {"scale": 1.5 + 0.3 * rng.standard_normal(self.head_dim)}
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), out)


PROMPTS, STEPS = np.array([9, 5, 0, 1]), 24
ROWS, LONGEST = len(PROMPTS), 9


def inputs(in_features, seed=1):
    """Prompts [B, T, F], later tokens [S, B, F], and who is active [S, B]; NaN where nothing may be read."""
    rng = np.random.default_rng(seed)
    prompts = rng.standard_normal((ROWS, LONGEST, in_features)).astype(np.float32)
    prompts[np.arange(LONGEST) >= PROMPTS[:, None]] = np.nan
    later = rng.standard_normal((STEPS, ROWS, in_features)).astype(np.float32)
    active = np.ones((STEPS, ROWS), bool)
    active[::5, 1] = active[:7, 3] = False
    later[~active] = np.nan
    return prompts, later, active


def fresh_state(policy, num_kv_heads, head_dim, page_size, *, rows=ROWS, tokens=LONGEST + STEPS, layers=1):
    """An empty float32 state whose pools hold NaN."""
    per_row = -(-tokens // page_size)
    config = h2o_jax.CacheConfig(
        layers, num_kv_heads, head_dim, page_size, rows * per_row, rows, per_row, dtype=jnp.float32
    )
    state = h2o_jax.init_state(config, policy)
    nan = functools.partial(jnp.full_like, fill_value=jnp.nan)
    poisoned = tuple(dataclasses.replace(cache, k=nan(cache.k), v=nan(cache.v)) for cache in state.layers)
    return h2o_jax.PagedState(state.table, poisoned)


class Loop:
    """A jitted decode loop of one layer, its state donated.

    Args:
        call: `call(parameters, cache, table, x, num_tokens) -> (cache, y)`.

    Attributes:
        traces: how often the call was traced.
    """

    def __init__(self, call):
        self.call = call
        self.traces = 0
        self.prefill = jax.jit(self._step, donate_argnums=1)
        self.decode = jax.jit(self._decode, donate_argnums=1)

    def _step(self, parameters, state, x, num_tokens):
        self.traces += 1
        table, _ = h2o_jax.extend(state.table, num_tokens)
        cache, y = self.call(parameters, state.layers[0], table, x, num_tokens)
        return h2o_jax.PagedState(table, (cache,)), y

    def _decode(self, parameters, state, xs, active):
        """xs [S, B, F], active [S, B] bool -> (state, ys [S, B, F])."""

        def body(state, step):
            x, num_tokens = step
            state, y = self._step(parameters, state, x[:, None], num_tokens)
            return state, y[:, 0]

        return jax.lax.scan(body, state, (xs, active.astype(jnp.int32)))

    def run(self, parameters, case):
        """The prompts' outputs [B, T, F] and those of all steps [S, B, F], decoded in two halves."""
        prompts, later, active = inputs(case.in_features)
        state = fresh_state(case.get_policy(), case.num_kv_heads, case.head_dim, case.page_size)
        state, first = self.prefill(parameters, state, prompts, jnp.asarray(PROMPTS, jnp.int32))
        half, outs = STEPS // 2, []
        for part in (slice(half), slice(half, STEPS)):
            given = state.layers[0].k
            state, out = self.decode(parameters, state, later[part], active[part])
            assert given.is_deleted(), "the state was copied"
            outs.append(np.asarray(out))
        return np.asarray(first), np.concatenate(outs)


def dense_loop(call, parameters, xs, active, num_kv_heads, head_dim):
    """Outputs [S, B, F] of decoding [S, B, F] from nothing with the dense policy."""
    policy = h2o_jax.get_policy("dense_attention")
    state = fresh_state(policy, num_kv_heads, head_dim, 4, rows=xs.shape[1], tokens=len(xs))
    _, out = Loop(call).decode(parameters, state, xs, active)
    return np.asarray(out)


def assert_close(got, expected, name="output"):
    """Asserts float32 agreement, 4e-6 of the largest; `test_rejects_mutants` holds it against errors."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=4e-6 * np.abs(expected).max(), err_msg=name)


class Oracle:
    """The attention module in float64 NumPy, over `h2o_jax.reference`.

    Args:
        case: what to compute.
        parameters: of `case.parameters()`.
        shift: added to every position before the rotation, of queries alone: 0, but for a mutant.
    """

    def __init__(self, case, parameters, shift=0):
        self.case = case
        self.parameters = jax.tree.map(lambda x: np.asarray(x, np.float64), parameters)
        self.shift = shift
        budget = dict(top_k=case.top_k, reserved_bos=1, reserved_eos=1) if case.top_k else {}
        self.request = functools.partial(
            reference.Request, case.policy, num_kv_heads=case.num_kv_heads, page_size=case.page_size, **budget
        )

    def run(self):
        """As `Loop.run`, 0 where a row has nothing to say."""
        prompts, later, active = inputs(self.case.in_features)
        first = np.zeros((ROWS, LONGEST, self.case.out_features))
        outs = np.zeros((STEPS, ROWS, self.case.out_features))
        for row in range(ROWS):
            request = self.request()
            length = PROMPTS[row]
            if length:
                q, k, v = self._project(prompts[row, :length], 0)
                first[row, :length] = self._out(request.prefill(q, k, v))
            for step in np.flatnonzero(active[:, row]):
                q, k, v = self._project(later[step, row][None], request.seq_len)
                outs[step, row] = self._out(request.decode(q[0], k[0], v[0]).out[None])[0]
        return first, outs

    def _linear(self, part, x):
        values = self.parameters[part]
        return x @ values["kernel"] + values.get("bias", 0.0)

    def _project(self, x, start):
        """x [T, F] of positions from `start` -> q, k, v [T, H, D]."""
        heads = [
            self._linear(part, np.asarray(x, np.float64)).reshape(len(x), -1, self.case.head_dim)
            for part in ("q_proj", "k_proj", "v_proj")
        ]
        for i, part in enumerate(("q_norm", "k_norm")):
            if self.case.qk_norm:
                heads[i] = self._norm(heads[i]) * self.parameters[part]["scale"]
            if self.case.rope:
                heads[i] = _rotate(heads[i], np.arange(start, start + len(x)) + (self.shift if i == 0 else 0))
        return heads

    def _norm(self, x):
        if self.case.qk_norm == "layer":
            x = x - x.mean(axis=-1, keepdims=True)
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)

    def _out(self, out):
        return self._linear("o_proj", out.reshape(len(out), -1))


def _rotate(x, positions):
    """The llama3 rule of `Case.options`, as published with Llama 3.1: x [T, H, D]."""
    half = x.shape[-1] // 2
    frequencies = 1000.0 ** (-np.arange(half) / half)
    for i, frequency in enumerate(frequencies):
        wavelength = 2 * np.pi / frequency
        if wavelength > 64 / 1.0:
            frequencies[i] = frequency / 4.0
        elif wavelength > 64 / 4.0:
            smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
            frequencies[i] = (1 - smooth) * frequency / 4.0 + smooth * frequency
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * positions[:, None] * frequencies)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)
