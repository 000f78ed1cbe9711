"""What a policy is, and the registry of policies by name."""

import dataclasses
import numbers
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from h2o_jax.config import MAX_INT32, CacheConfig

if TYPE_CHECKING:
    from h2o_jax.state import LayerCache, PageTable


_MAX_FLOAT32 = float(jnp.finfo(jnp.float32).max)


class Window(NamedTuple):
    """The logical pages of each row that are scored: `[start, stop)`, empty where start >= stop.

    Attributes:
        start, stop: [B] int32.
    """

    start: jax.Array
    stop: jax.Array


@dataclasses.dataclass(frozen=True)
class Policy:
    """A rule for scoring pages. Frozen and hashable, so it can be a static argument of a jitted function.

    A user's own policy is a frozen dataclass that derives from this, defines `score` and registers itself
    with `register_policy`; choosing the top pages and attending to them come with the base.

    Attributes:
        top_k: pages chosen by score for each row and KV head.
        reserved_bos: leading pages that are always attended and never scored.
        reserved_eos: trailing pages that are always attended and never scored; at least 1, since the
            last page is being filled.
        dense_layers: layers that attend to all pages instead.
        summary_kinds: page summaries this policy needs, of "mean", "max", "min" (class attribute); they
            are kept up to date by `write_tokens` and read with `page_summaries`.
        page_size: the page size this policy requires, None for any (class attribute).

    Raises:
        ValueError: a wrong option; the message names it.
    """

    top_k: int
    reserved_bos: int = 1
    reserved_eos: int = 2
    dense_layers: tuple[int, ...] = ()

    summary_kinds: ClassVar[tuple[str, ...]] = ()
    page_size: ClassVar[int | None] = None
    least_top_k: ClassVar[int] = 1

    def __post_init__(self) -> None:
        for name, least in (("top_k", self.least_top_k), ("reserved_bos", 0), ("reserved_eos", 1)):
            object.__setattr__(self, name, _int_option(name, getattr(self, name), least))
        if self.top_k + self.reserved_bos + self.reserved_eos > MAX_INT32:
            raise ValueError(f"top_k: expected at most {MAX_INT32} pages with the reserved ones, got {self.top_k}")
        if not isinstance(self.dense_layers, Iterable) or isinstance(self.dense_layers, str):
            raise ValueError(f"dense_layers: expected a sequence of layers, got {self.dense_layers!r}")
        layers = {_int_option("dense_layers", layer, 0) for layer in self.dense_layers}
        object.__setattr__(self, "dense_layers", tuple(sorted(layers)))

    def budget(self, pages_per_request: int) -> int:
        """W, the most pages that a row reads: `top_k + reserved_bos + reserved_eos`."""
        return self.top_k + self.reserved_bos + self.reserved_eos

    def for_layer(self, layer: int) -> "Policy":
        """The policy of one layer: the dense policy for `layer in dense_layers`, else this one."""
        return get_policy("dense_attention") if layer in self.dense_layers else self

    def check_page_size(self, page_size: int) -> None:
        """Raises ValueError unless the policy can run with pages of that many tokens."""
        if self.page_size not in (None, page_size):
            raise ValueError(f"page_size: {type(self).__name__} needs pages of {self.page_size} token, got {page_size}")

    def init_aux(self, config: CacheConfig) -> dict[str, jax.Array]:
        """The arrays this policy keeps for one layer, each with `num_pages` as its first axis.

        "summaries" is declared here for `summary_kinds`. A policy that accumulates scores declares
        "hh_score" [num_pages, Hkv, P]; `write_tokens` resets it for each written token. Shapes may depend
        on the sizes of the pool alone, not on the number of layers, rows or pages of a row.

        Raises:
            ValueError: the policy can't run with this page size.
        """
        self.check_page_size(config.page_size)
        if not self.summary_kinds:
            return {}
        shape = (config.num_pages, config.num_kv_heads, len(self.summary_kinds), config.head_dim)
        return {"summaries": jnp.zeros(shape, config.dtype)}

    def on_write(
        self, cache: "LayerCache", table: "PageTable", k: jax.Array, v: jax.Array, num_tokens: jax.Array
    ) -> "LayerCache":
        """Updates aux arrays of the policy's own after tokens were written.

        Args:
            cache: the layer's cache; k, v, "summaries" and "hh_score" are already up to date.
            table: page table, extended by the written tokens.
            k, v: [B, T, Hkv, D] the written tokens, right-padded.
            num_tokens: [B] int32, how many of the T are real.

        Returns:
            The cache, with new `aux` arrays where the policy has any.
        """
        return cache

    def score(
        self,
        cache: "LayerCache",
        table: "PageTable",
        q: jax.Array,
        window: Window,
        *,
        implementation: str | None = None,
    ) -> tuple["LayerCache", jax.Array]:
        """Scores the pages of the window.

        Args:
            cache: the layer's cache.
            table: page table.
            q: [B, Hq, D] queries of the token being decoded.
            window: the pages that count. Scores outside it are ignored; a policy that keeps state must
                leave the state of tokens outside it alone.
            implementation: passed on to ops that take it.

        Returns:
            The cache (changed only by a policy that accumulates) and [B, Hkv, M] scores.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define score()")


def require_policy(value: Any) -> None:
    """Raises ValueError unless it is a `Policy`, and hashable."""
    if not isinstance(value, Policy):
        raise ValueError(f"policy: expected a Policy, such as get_policy(name) gives, got {value!r}")
    try:
        hash(value)
    except TypeError as error:
        raise ValueError(f"policy: expected hashable options, got {value!r}: {error}") from None


def is_number(value: Any) -> bool:
    """Whether an option is a real number that float32 holds, up to rounding."""
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and abs(float(value)) <= _MAX_FLOAT32
    except OverflowError:  # an integer past float64
        return False


def is_integer(value: Any, least: int) -> bool:
    """Whether an option is an integer, NumPy's included, of at least `least`."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def _int_option(name: str, value: Any, least: int) -> int:
    if not is_integer(value, least):
        raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")
    return int(value)


_REGISTRY: dict[str, type[Policy]] = {}
_AnyPolicy = TypeVar("_AnyPolicy", bound=Policy)


def register_policy(name: str) -> Callable[[type[_AnyPolicy]], type[_AnyPolicy]]:
    """Class decorator that makes a policy known to `get_policy` under `name`.

    Raises:
        ValueError: no name, one that is taken, or a class that does not derive from `Policy`.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f'register_policy: expected a name, as in @register_policy("mine"), got {name!r}')

    def register(cls: type[_AnyPolicy]) -> type[_AnyPolicy]:
        if not (isinstance(cls, type) and issubclass(cls, Policy)):
            raise ValueError(f"register_policy({name!r}): expected a subclass of Policy, got {cls!r}")
        if name in _REGISTRY:
            raise ValueError(f"register_policy: the name {name!r} is taken by {_REGISTRY[name].__name__}")
        _REGISTRY[name] = cls
        return cls

    return register


def list_policies() -> tuple[str, ...]:
    """Names of all registered policies, in order of registration."""
    return tuple(_REGISTRY)


def policy_class(name: str) -> type[Policy]:
    """The class registered under `name`; ValueError listing the names where there is none."""
    if not isinstance(name, str) or name not in _REGISTRY:
        raise ValueError(f"unknown policy {name!r}; registered are {', '.join(_REGISTRY)}")
    return _REGISTRY[name]


def get_policy(name: str, **options: Any) -> Policy:
    """A policy by its registered name.

    Args:
        name: one of `list_policies()`.
        **options: the policy's fields, such as `top_k`, `reserved_bos`, `reserved_eos`, `dense_layers`.

    Raises:
        ValueError: an unknown name (the message lists the names), an unknown or missing option, or a
            wrong value.
    """
    cls = policy_class(name)
    fields = [f for f in dataclasses.fields(cls) if f.init]
    unknown = sorted(set(options) - {f.name for f in fields})
    if unknown:
        raise ValueError(f"{name}: unknown option {unknown[0]!r}; its options are {[f.name for f in fields]}")
    no_default = dataclasses.MISSING
    for field in fields:
        if field.default is no_default and field.default_factory is no_default and field.name not in options:
            raise ValueError(f"{name}: option {field.name!r} is required")
    return cls(**options)


def reserved_pages(page_size: int) -> tuple[int, int]:
    """`reserved_bos` and `reserved_eos` that hold 16 and 32 tokens, as the defaults do at a page size of 16."""
    return -(-16 // page_size), -(-32 // page_size)
