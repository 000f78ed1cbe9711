"""No request sees anything of another: many through a small pool, all that none owns being NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import h2o_jax
from tests.kernel_runs import GPU_MARKS
from tests.test_serving import NUM_REQUESTS, case, new_server  # noqa: F401 (case is a fixture)

MAX_NEW = 7
RUNS = [("xla", 500), ("pallas_interpret", 500), pytest.param("pallas", 500, marks=GPU_MARKS)]


@jax.jit
def poison(state):
    """The state with NaN in every slot that no row has written: unowned pages and the rest of last pages."""
    table, size = state.table, state.table.page_size
    logical = jnp.arange(table.pages.shape[1])
    tokens = jnp.clip(table.seq_lens[:, None] - logical * size, 0, size)  # of each row's pages
    live = jnp.zeros(table.num_pages, jnp.int32).at[table.pages].set(tokens, mode="drop")

    def kept(name, x):
        if name == "summaries":
            return jnp.where((live == size)[:, None, None, None], x, jnp.nan)
        slot = (jnp.arange(size) < live[:, None])[:, None]
        return jnp.where(slot.reshape(slot.shape + (1,) * (x.ndim - 3)), x, jnp.nan)

    layers = tuple(
        h2o_jax.LayerCache(
            kept("k", layer.k),
            kept("v", layer.v),
            {name: kept(name, x) for name, x in layer.aux.items()},
            layer.summary_kinds,
        )
        for layer in state.layers
    )
    return h2o_jax.PagedState(table, layers)


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "admissions"), RUNS)
def test_admissions_to_a_poisoned_pool(case, implementation, admissions):  # noqa: F811
    server = new_server(case.model, case.policy, implementation=implementation)
    rng = np.random.default_rng(1)
    which = rng.integers(0, NUM_REQUESTS, admissions).tolist()
    new = rng.integers(1, MAX_NEW + 1, admissions).tolist()
    for i, n in zip(which, new):
        server.submit(case.requests[i][0], max_new_tokens=n)
    tokens = {}
    while server.num_running:
        server._state = poison(server._state)
        for request, token, _ in server.step():
            tokens.setdefault(request, []).append(token)
    h2o_jax.check_state(server._state, server.config)
    assert tokens == {r: case.alone[i][:n] for r, (i, n) in enumerate(zip(which, new))}
