"""What the case tables of the scoring ops share: page tables of windows."""

import numpy as np

NO_PAGE_ENTRIES = (-5, -1, 10**6, 2**31 - 1)  # besides num_pages


def window_pages(rng: np.random.Generator, windows, holes: bool, shape, num_pages: int):
    """Permuted page ids for rows with these windows, and which pages the windows hold.

    Args:
        rng: source of the ids.
        windows: (start, stop) of each row.
        holes: whether every third entry of a window is no page.
        shape: [B, M]; entries past a window are no pages.
        num_pages: pages of the pool.

    Returns:
        Page table [B, M], and [num_pages] bool.
    """
    ids = rng.permutation(num_pages)
    pages = rng.choice([num_pages, *NO_PAGE_ENTRIES], shape)
    scored = np.zeros(num_pages, bool)
    for row, (start, stop) in enumerate(windows):
        pages[row, :stop], ids = ids[:stop], ids[stop:]
        if holes:
            pages[row, start:stop:3] = rng.choice([num_pages, *NO_PAGE_ENTRIES], len(range(start, stop, 3)))
        inside = pages[row, start:stop]
        scored[inside[(inside >= 0) & (inside < num_pages)]] = True
    return pages, scored
