"""The fewest bytes that must move: what the percentages of bandwidth are counted on.

For Hkv KV heads of D components of e bytes (2 in bfloat16), S summaries a page, with the pages of all rows
added up; a row of N <= W pages has no window:

    envelope    window pages x Hkv x (S x D x e + 4)            summaries read, scores written
    softmax     window pages x Hkv x (D x e + 4 + 4 + 4)        keys read, scores read, stored and given out
    top-k       Hkv x (4 x window pages + 4 x top_k)            scores read, ids written
    attention   Hkv x D x e x (2 x attended tokens + 2 x rows x G)      keys, values; queries and output
    write       Hkv x D x e x (4 x rows)                        keys and values read and written,
                + Hkv x D x e x (P + S) for each page completed         its keys read, its summaries written
    step        write + envelope or softmax + top-k + attention

Page tables, counts and partial results are not counted.
"""

from h2o_jax.bench.inputs import Sizes
from h2o_jax.policy import Policy

SCORE_BYTES = 4  # float32; also of an id


def pages_scored(sizes: Sizes, policy: Policy) -> int:
    """Pages of all windows."""
    if not policy.top_k:
        return 0
    reserved = policy.reserved_bos + policy.reserved_eos
    return sum(n - reserved for n in sizes.pages_in_use if _is_sparse(n, sizes, policy))


def tokens_attended(sizes: Sizes, policy: Policy) -> int:
    """Tokens that all rows read for one KV head."""
    total = 0
    for length, n in zip(sizes.lengths, sizes.pages_in_use):
        skipped = n - policy.budget(sizes.pages_per_request) if _is_sparse(n, sizes, policy) else 0
        total += length - skipped * sizes.page_size  # pages before the last are full
    return total


def envelope(sizes: Sizes, policy: Policy) -> int:
    summaries = len(policy.summary_kinds) * sizes.vector_bytes
    return pages_scored(sizes, policy) * sizes.num_kv_heads * (summaries + SCORE_BYTES)


def softmax(sizes: Sizes, policy: Policy) -> int:
    return pages_scored(sizes, policy) * sizes.num_kv_heads * (sizes.vector_bytes + 3 * SCORE_BYTES)


def top_k(num_rows: int, window: int, k: int) -> int:
    """Of `num_rows` rows, each of a request and a KV head, with windows of `window` pages."""
    return num_rows * SCORE_BYTES * (window + k)


def attention(sizes: Sizes, policy: Policy) -> int:
    vectors = 2 * tokens_attended(sizes, policy) + 2 * sizes.rows_in_use * sizes.group_size
    return sizes.num_kv_heads * sizes.vector_bytes * vectors


def write(sizes: Sizes, policy: Policy) -> int:
    vectors = 4 * sizes.rows_in_use
    if policy.summary_kinds:
        completed = sum(length > 0 and length % sizes.page_size == 0 for length in sizes.lengths)
        vectors += completed * (sizes.page_size + len(policy.summary_kinds))
    return sizes.num_kv_heads * sizes.vector_bytes * vectors


def step(sizes: Sizes, policy: Policy) -> int:
    """Of write, select and attend."""
    score = 0
    if policy.top_k:
        score = (softmax if policy.page_size == 1 else envelope)(sizes, policy)
        for n in sizes.pages_in_use:
            if _is_sparse(n, sizes, policy):
                window = n - policy.reserved_bos - policy.reserved_eos
                score += top_k(sizes.num_kv_heads, window, policy.top_k)
    return write(sizes, policy) + score + attention(sizes, policy)


def _is_sparse(num_pages: int, sizes: Sizes, policy: Policy) -> bool:
    return num_pages > policy.budget(sizes.pages_per_request)
