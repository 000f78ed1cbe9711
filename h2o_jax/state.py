"""The state of a decode loop: page table and pools, as pytrees of fixed arrays.

Letters: B max_requests, M pages_per_request, P page_size, Hkv num_kv_heads, D head_dim.
"""

import dataclasses
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from h2o_jax import memory
from h2o_jax.config import CacheConfig
from h2o_jax.policy import Policy, require_policy
from pallas_kernels._checks import FLOAT_DTYPES, check_dtype, check_kind, check_shape
from pallas_kernels.write_pages.api import SUMMARY_KINDS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageTable:
    """Which pages each request row owns, and the allocator's free pages.

    Attributes:
        pages: [B, M] int32, logical page -> physical page; `num_pages` (NO_PAGE) where none. The first
            `pages_in_use[b]` entries of row b are valid.
        seq_lens: [B] int32, tokens cached in each row, the token being decoded included; 0 for an
            empty row.
        free_pages: [num_pages] int32, a stack: its first `num_free` entries are the free physical pages.
        num_free: int32 scalar.
        page_size: P (static).
    """

    pages: jax.Array
    seq_lens: jax.Array
    free_pages: jax.Array
    num_free: jax.Array
    page_size: int = dataclasses.field(metadata=dict(static=True))

    @property
    def num_pages(self) -> int:
        """Physical pages of the pool; also NO_PAGE, the entry that names no page."""
        return self.free_pages.shape[0]

    @property
    def pages_in_use(self) -> jax.Array:
        """[B] int32, N = ceil(seq_len / P)."""
        return -(-self.seq_lens // self.page_size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's pool.

    Attributes:
        k, v: [num_pages, Hkv, P, D] in the pool's dtype. Only slots of owned pages below `seq_len` are
            valid.
        aux: arrays the policy declared, each with `num_pages` as its first axis. Of the built-in
            policies: "summaries" [num_pages, Hkv, S, D] in the pool's dtype, valid for complete pages;
            "hh_score" [num_pages, Hkv, P].
        summary_kinds: what the S rows of `aux["summaries"]` are (static).
    """

    k: jax.Array
    v: jax.Array
    aux: dict[str, jax.Array]
    summary_kinds: tuple[str, ...] = dataclasses.field(default=(), metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedState:
    """Everything a decode loop carries.

    Attributes:
        table: page table, shared by all layers.
        layers: one `LayerCache` per layer.
    """

    table: PageTable
    layers: tuple[LayerCache, ...]


def init_state(config: CacheConfig, policy: Policy) -> PagedState:
    """An empty state: no request, every page free. No two of its arrays share a buffer.

    Args:
        config: sizes of the cache.
        policy: the policy of the decode loop; layer i holds the arrays that `policy.for_layer(i)` needs.

    Raises:
        ValueError: no policy, one that can't run with this page size, or a dense layer that does not exist.
        MemoryError: the device has too little memory left; the message says what was asked, and what would fit.
    """
    check_kind("config", config, CacheConfig)
    require_policy(policy)
    check_layers(policy, config)
    try:
        return _empty(config, policy)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the arrays made so far
        shapes = jax.eval_shape(lambda: _empty(config, policy))
        # JAX makes the attributes of its options at run time.
        device = jax.config.jax_default_device or jax.local_devices()[0]  # type: ignore[attr-defined]
        raise memory.out_of_memory(shapes, config.num_pages, memory.free(device)) from error


def check_layers(policy: Policy, config: CacheConfig) -> None:
    """Raises ValueError unless all dense layers of the policy exist."""
    beyond = [i for i in policy.dense_layers if i >= config.num_layers]
    if beyond:
        raise ValueError(f"dense_layers: expected layers below num_layers = {config.num_layers}, got {beyond}")


def _empty(config: CacheConfig, policy: Policy) -> PagedState:
    b, m = config.max_requests, config.pages_per_request
    table = PageTable(
        pages=jnp.full((b, m), config.num_pages, jnp.int32),
        seq_lens=jnp.zeros((b,), jnp.int32),
        free_pages=jnp.arange(config.num_pages - 1, -1, -1, dtype=jnp.int32),  # page 0 is taken first
        num_free=jnp.array(config.num_pages, jnp.int32),
        page_size=config.page_size,
    )
    return PagedState(table, tuple(_init_layer(config, policy.for_layer(i)) for i in range(config.num_layers)))


def _init_layer(config: CacheConfig, policy: Policy) -> LayerCache:
    # Each is waited for: JAX hands out an array before it has its memory, which a GPU is asked for again and again
    # for ten seconds, and so for every array after the first that does not fit.
    return LayerCache(
        k=jax.block_until_ready(jnp.zeros(config.pool_shape, config.dtype)),
        v=jax.block_until_ready(jnp.zeros(config.pool_shape, config.dtype)),
        aux=jax.block_until_ready(made_aux(policy, config)),
        summary_kinds=policy.summary_kinds,
    )


def made_aux(policy: Policy, config: CacheConfig) -> dict[str, jax.Array]:
    """What `init_aux` of a policy gives; raises ValueError unless it is what the method promises."""
    name, kinds = type(policy).__name__, policy.summary_kinds
    if not isinstance(kinds, tuple) or len(set(kinds)) < len(kinds) or not set(kinds) <= set(SUMMARY_KINDS):
        raise ValueError(f"summary_kinds of {name}: expected a tuple of {SUMMARY_KINDS}, got {kinds!r}")
    aux = policy.init_aux(config)
    where = f"init_aux() of {name}"
    check_kind(where, aux, dict)
    if policy.summary_kinds and "summaries" not in aux:
        raise ValueError(f"{where}: expected 'summaries' for summary_kinds, as super().init_aux(config) gives them")
    for key, array in aux.items():
        shape = getattr(array, "shape", None)
        if not shape or shape[0] != config.num_pages:
            got = type(array).__name__ if shape is None else list(shape)
            raise ValueError(f"{where}: expected {key!r} of shape [{config.num_pages}, ...], got {got}")
    return aux


def page_summaries(cache: LayerCache) -> dict[str, jax.Array]:
    """The page summaries that the layer's policy keeps.

    Args:
        cache: a layer's cache.

    Returns:
        "mean", "max", "min" (those kept): [num_pages, Hkv, D] in the pool's dtype. An entry is valid for
        a page whose last slot has been written; empty for a policy without summaries.
    """
    check_kind("cache", cache, LayerCache)
    return {kind: cache.aux["summaries"][:, :, i] for i, kind in enumerate(cache.summary_kinds)}


def check_state(state: PagedState, config: CacheConfig) -> None:
    """Checks every invariant of a state. Eager: it reads the page table back to the host.

    Args:
        state: the state to check.
        config: the sizes it was made with.

    Raises:
        ValueError: a wrong shape or dtype, a length past the row, a page id out of range, a page owned
            twice, leaked, or both free and owned; the message names row and entry.
    """
    check_kind("state", state, PagedState)
    check_kind("config", config, CacheConfig)
    _check_arrays(state, config)
    check_table(state.table)


def check_rows(table: PageTable) -> None:
    """Raises unless it is a page table of a pool that has pages, with a length for each row."""
    check_kind("table", table, PageTable)
    for name, size in (("num_pages", table.num_pages), ("page_size", table.page_size)):
        if size < 1:
            raise ValueError(f"table: expected {name} of at least 1, got {size}")
    check_shape("table.pages", table.pages, (None, None), "[B, M]")
    check_shape("table.seq_lens", table.seq_lens, table.pages.shape[:1], "[B]")


def check_table(table: PageTable, where: str = "") -> None:
    """Checks the values of a page table, of arrays on the host or the device.

    Args:
        table: the table to check.
        where: what the messages begin with.

    Raises:
        ValueError: as `check_state`, of values.
    """
    pages, seq_lens, free = (np.asarray(x) for x in (table.pages, table.seq_lens, table.free_pages))
    num_free, no_page, page_size = int(table.num_free), table.num_pages, table.page_size
    if not 0 <= num_free <= no_page:
        raise ValueError(f"{where}table.num_free: expected 0 to {no_page}, got {num_free}")

    owner = np.full(no_page, -1, np.int64)  # place in `pages`, row-major, that owns a page
    for row, length in enumerate(seq_lens.tolist()):
        most = pages.shape[1] * page_size
        if not 0 <= length <= most:
            raise ValueError(f"{where}table.seq_lens, row {row}: expected 0 to {most}, got {length}")
        in_use = -(-length // page_size)
        for entry, page in enumerate(pages[row].tolist()):
            place = f"{where}table.pages, row {row}, entry {entry}"
            if entry >= in_use:
                if page != no_page:
                    raise ValueError(f"{place}: expected NO_PAGE = {no_page} past {in_use} pages, got {page}")
            elif not 0 <= page < no_page:
                raise ValueError(f"{place}: expected a page in [0, {no_page}), got {page}")
            elif owner[page] >= 0:
                raise ValueError(f"{place}: page {page} is already owned by {_place(owner[page], pages)}")
            else:
                owner[page] = row * pages.shape[1] + entry

    stack = free[:num_free]
    bad = np.flatnonzero((stack < 0) | (stack >= no_page))
    if bad.size:
        entry = bad[0]
        raise ValueError(
            f"{where}table.free_pages, entry {entry}: expected a page in [0, {no_page}), got {stack[entry]}"
        )
    count = np.bincount(stack, minlength=no_page)
    for problem, message in (
        (count > 1, "is in the free stack more than once"),
        ((count > 0) & (owner >= 0), "is free and owned by"),
        ((count == 0) & (owner < 0), "is leaked: neither free nor owned"),
    ):
        if problem.any():
            page = int(np.flatnonzero(problem)[0])
            by = f" {_place(owner[page], pages)}" if message.endswith("by") else ""
            raise ValueError(f"{where}table.free_pages: page {page} {message}{by}")


def _place(index: int, pages: np.ndarray) -> str:
    row, entry = divmod(int(index), pages.shape[1])
    return f"row {row}, entry {entry}"


def _check_arrays(state: PagedState, config: CacheConfig) -> None:
    b, m, n = config.max_requests, config.pages_per_request, config.num_pages
    table = state.table
    expected: list[tuple[str, jax.Array, tuple[int, ...], Any]] = [
        ("table.pages", table.pages, (b, m), jnp.int32),
        ("table.seq_lens", table.seq_lens, (b,), jnp.int32),
        ("table.free_pages", table.free_pages, (n,), jnp.int32),
        ("table.num_free", table.num_free, (), jnp.int32),
    ]
    for i, layer in enumerate(state.layers):
        expected += [(f"layers[{i}].{name}", getattr(layer, name), config.pool_shape, config.dtype) for name in "kv"]
        if layer.summary_kinds and "summaries" not in layer.aux:
            raise ValueError(f"layers[{i}].aux: expected 'summaries' for {layer.summary_kinds}, got {list(layer.aux)}")
        summaries = (n, config.num_kv_heads, len(layer.summary_kinds), config.head_dim)
        for name, x in layer.aux.items():
            shape, dtype = (n, *x.shape[1:]), x.dtype
            if name == "summaries":
                shape, dtype = summaries, config.dtype
            elif name == "hh_score":
                shape = config.pool_shape[:3]
                check_dtype(f"layers[{i}].aux['hh_score']", x, FLOAT_DTYPES)
            expected.append((f"layers[{i}].aux[{name!r}]", x, shape, dtype))
    for name, array, shape, dtype in expected:
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"{name}: expected {jnp.dtype(dtype).name}{list(shape)}, got {array.dtype.name}{list(array.shape)}"
            )
    if table.page_size != config.page_size:
        raise ValueError(f"table.page_size: expected {config.page_size}, got {table.page_size}")
    if len(state.layers) != config.num_layers:
        raise ValueError(f"layers: expected {config.num_layers}, got {len(state.layers)}")
