"""Rotary position embedding (Su et al., arXiv:2104.09864), shared by the NNX and Linen modules.

The layout is the half-rotation one of Hugging Face and GPT-NeoX: component i is paired with i + D/2.
Letters: B rows, T tokens, H heads, D head_dim.
"""

import dataclasses
import math
import numbers
import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_KINDS = ("linear", "llama3", "factors")
_LEAST, _MOST = (float(limit) for limit in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
_MOST_HEAD_DIM = 1 << 15


def check_positive(name: str, value: Any) -> None:
    """Checks that a setting is a positive number that float32 neither rounds to 0 or infinity nor holds with
    less than its precision.

    Raises:
        ValueError: it is something else.
    """
    is_real = isinstance(value, numbers.Real)
    if not is_real or not _LEAST <= value <= _MOST:
        raise ValueError(f"{name}: expected a positive number in float32's range; got {reprlib.repr(value)}")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How the rotation frequencies are stretched to reach longer contexts.

    Attributes:
        kind: "linear" divides every frequency by `factor`; "llama3" divides the low ones by `factor`,
            keeps the high ones and blends between; "factors" divides frequency i by `factors[i]`.
        factor: the stretch of "linear" and "llama3".
        low_freq_factor, high_freq_factor, original_max_position: the "llama3" band, in turns over
            the original context, and that context in tokens.
        factors: [D/2] divisors of "factors" (GGUF files carry the llama3 rule in this form).

    Raises:
        ValueError: an unknown kind, or a value out of range.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"kind: expected one of {', '.join(_KINDS)}; got {self.kind!r}")
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            check_positive(name, getattr(self, name))
        if not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                "low_freq_factor, high_freq_factor: expected low < high; got "
                f"{self.low_freq_factor!r}, {self.high_freq_factor!r}"
            )
        if not isinstance(self.original_max_position, int) or not 1 <= self.original_max_position < 2**31:
            raise ValueError(
                "original_max_position: expected a positive integer below 2**31; got "
                f"{reprlib.repr(self.original_max_position)}"
            )
        for factor in self.factors:
            check_positive("factors", factor)


@dataclasses.dataclass(frozen=True)
class RotaryEmbedding:
    """Rotates queries and keys by their position. Frozen and hashable: a static part of a module.

    Attributes:
        head_dim: D, even.
        theta: base of the frequencies, `theta ** (-2 i / D)` for i < D/2.
        scaling: optional stretch of the frequencies.

    Raises:
        ValueError: a head_dim that is odd or out of range, a theta that is not positive, or `scaling.factors`
            of another length than D/2.
    """

    head_dim: int
    theta: float = 10000.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.head_dim <= _MOST_HEAD_DIM or self.head_dim % 2:
            raise ValueError(
                f"head_dim: expected an even number from 2 to {_MOST_HEAD_DIM}; got {self.head_dim!r}"
            )
        check_positive("theta", self.theta)
        if self.scaling is not None and self.scaling.kind == "factors":
            if len(self.scaling.factors) != self.head_dim // 2:
                raise ValueError(
                    f"scaling.factors: expected {self.head_dim // 2} values (head_dim / 2); "
                    f"got {len(self.scaling.factors)}"
                )

    def frequencies(self) -> np.ndarray:
        """Radians per token, [D/2] float64."""
        frequency = self.theta ** (-np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim)
        scaling = self.scaling
        if scaling is None:
            return frequency
        if scaling.kind == "linear":
            return frequency / scaling.factor
        if scaling.kind == "factors":
            return frequency / np.asarray(scaling.factors, np.float64)
        turns = scaling.original_max_position * frequency / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return kept * frequency + (1.0 - kept) * frequency / scaling.factor

    def tables(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine of each position's angles.

        The product of position and frequency is taken in 32-bit fixed point, in turns, whose overflow
        is the reduction modulo one turn: a float32 product would lose up to half a unit in the last
        place of the whole angle, 1e-3 radians at position 32767 and more beyond.

        Args:
            positions: int32, any shape.

        Returns:
            (cos, sin), each float32, of shape `positions.shape + (D/2,)`.
        """
        turns = self.frequencies() / (2 * math.pi) % 1.0
        step = np.round(turns * 2.0**32).astype(np.uint64).astype(np.uint32)
        phase = positions.astype(jnp.uint32)[..., None] * step
        signed = jax.lax.bitcast_convert_type(phase, jnp.int32)
        angle = signed.astype(jnp.float32) * np.float32(2 * math.pi / 2.0**32)
        return jnp.cos(angle), jnp.sin(angle)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotates `x`.

        Args:
            x: [B, T, H, D] queries or keys.
            positions: [B, T] int32, the position of each token in its request.

        Returns:
            [B, T, H, D] in the dtype of `x`; the rotation itself is computed in float32.

        Raises:
            ValueError: the last axis of `x` is not head_dim.
        """
        if x.shape[-1] != self.head_dim:
            raise ValueError(f"x: expected a last axis of head_dim = {self.head_dim}; got shape {x.shape}")
        cos, sin = (table[:, :, None, :] for table in self.tables(positions))
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(
            x.dtype
        )
