"""Rotary position embedding (Su et al., arXiv:2104.09864), shared by the NNX and Linen modules.

The layout is the half-rotation one of Hugging Face and GPT-NeoX: component i is paired with i + D/2.
Letters: B rows, T tokens, H heads, D head_dim.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

_KINDS = ("linear", "llama3", "factors")


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
        if not self.factor > 0:
            raise ValueError(f"factor: expected a positive number; got {self.factor!r}")
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor > 0:
            raise ValueError(
                "low_freq_factor, high_freq_factor: expected 0 < low < high; got "
                f"{self.low_freq_factor!r}, {self.high_freq_factor!r}"
            )
        if self.kind == "llama3" and not self.original_max_position > 0:
            raise ValueError(f"original_max_position: expected > 0; got {self.original_max_position!r}")
        if any(not factor > 0 for factor in self.factors):
            raise ValueError(f"factors: expected positive numbers; got {self.factors!r}")


@dataclasses.dataclass(frozen=True)
class RotaryEmbedding:
    """Rotates queries and keys by their position. Frozen and hashable: a static part of a module.

    Attributes:
        head_dim: D, even.
        theta: base of the frequencies, `theta ** (-2 i / D)` for i < D/2.
        scaling: optional stretch of the frequencies.

    Raises:
        ValueError: an odd or non-positive head_dim, a theta that is not positive, or `scaling.factors`
            of another length than D/2.
    """

    head_dim: int
    theta: float = 10000.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number >= 2; got {self.head_dim!r}")
        if not self.theta > 0:
            raise ValueError(f"theta: expected a positive number; got {self.theta!r}")
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
