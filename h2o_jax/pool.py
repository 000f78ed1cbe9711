"""Allocation of pages: the free pages are a stack, taken from and given back at its top.

Both functions are pure and jittable, cost O(B M) whatever the size of the pool, and never sort.
"""

import dataclasses

import jax
import jax.numpy as jnp

from h2o_jax.state import PageTable, check_rows
from pallas_kernels._checks import check_dtype, check_row_ints, check_shape


def extend(table: PageTable, num_tokens: jax.Array) -> tuple[PageTable, jax.Array]:
    """Gives each request row pages for more tokens, and adds them to its length.

    All or nothing per row. A row that would outgrow its M pages is refused by itself. The others are
    served in index order until one does not fit in the pool: it and all later rows that need pages are
    refused. A row that needs no page is never refused for want of one.

    Args:
        table: page table before the step.
        num_tokens: [B] int32, tokens to add to each row; 0 leaves a row alone.

    Returns:
        The table after the step, and `ok`, [B] bool: False where the row was refused (also for a
        negative number of tokens). Such a row is left exactly as it was.

    Raises:
        ValueError: `num_tokens` is not [B] int32, or the pool or its pages are empty (at trace time).
    """
    check_rows(table)
    check_row_ints(table.pages.shape[0], num_tokens=num_tokens)
    num_logical, page_size = table.pages.shape[1], table.page_size
    room = num_logical * page_size - table.seq_lens
    allowed = (num_tokens >= 0) & (num_tokens <= room)

    grown = table.seq_lens + jnp.where(allowed, num_tokens, 0)
    before, after = table.pages_in_use, -(-grown // page_size)
    need = after - before
    taken = jnp.cumsum(need, dtype=jnp.int32)
    ok = allowed & ((need == 0) | (taken <= table.num_free))

    # Row b takes its pages from the top of the stack down, below those of the rows before it.
    logical = jnp.arange(num_logical, dtype=jnp.int32)[None]
    added = ok[:, None] & (logical >= before[:, None]) & (logical < after[:, None])
    entry = table.num_free - 1 - (taken - need - before)[:, None] - logical
    page = jnp.take(table.free_pages, jnp.where(added, entry, 0), mode="clip")
    table = dataclasses.replace(
        table,
        pages=jnp.where(added, page, table.pages),
        seq_lens=jnp.where(ok, grown, table.seq_lens),
        num_free=table.num_free - jnp.where(ok, need, 0).sum(dtype=jnp.int32),
    )
    return table, ok


def release(table: PageTable, done: jax.Array) -> PageTable:
    """Gives all pages of finished rows back to the pool. Idempotent: an empty row has nothing to give.

    The pool itself is not cleared; a page's next owner never reads what the last one left.

    Args:
        table: page table before the step.
        done: [B] bool, rows to empty.

    Returns:
        The table after the step: rows of `done` have length 0 and no pages.

    Raises:
        ValueError: `done` is not [B] bool, or as in `extend` (at trace time).
    """
    check_rows(table)
    batch, num_logical = table.pages.shape
    check_shape("done", done, (batch,), "[B]")
    check_dtype("done", done, ("bool",))
    given = jnp.where(done, table.pages_in_use, 0)
    end = table.num_free + jnp.cumsum(given, dtype=jnp.int32)
    logical = jnp.arange(num_logical, dtype=jnp.int32)[None]
    owned = logical < given[:, None]
    entry = jnp.where(owned, (end - given)[:, None] + logical, table.num_pages)
    return dataclasses.replace(
        table,
        pages=jnp.where(done[:, None], table.num_pages, table.pages),
        seq_lens=jnp.where(done, 0, table.seq_lens),
        free_pages=jnp.asarray(table.free_pages).at[entry].set(table.pages, mode="drop"),
        num_free=table.num_free + given.sum(dtype=jnp.int32),
    )
