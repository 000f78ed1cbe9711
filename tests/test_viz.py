"""What the pictures of `h2o_jax.viz` draw."""

import sys

import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest

import h2o_jax

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402 (after the choice of backend)

from h2o_jax import viz  # noqa: E402


@pytest.fixture
def ax():
    figure, ax = plt.subplots()
    yield ax
    plt.close(figure)


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def table():
    """Pages of 4, a pool of 20: row 0 released and its pages in row 2, row 1 of 6 tokens."""
    config = h2o_jax.CacheConfig(1, 1, 2, page_size=4, num_pages=20, max_requests=3, pages_per_request=4)
    table = h2o_jax.init_state(config, h2o_jax.get_policy("dense_attention")).table
    table, _ = h2o_jax.extend(table, jnp.array([5, 6, 0], jnp.int32))
    table = h2o_jax.release(table, jnp.array([True, False, False]))
    return h2o_jax.extend(table, jnp.array([0, 0, 11], jnp.int32))[0]


def test_scores(ax):
    scores = jnp.array([[-jnp.inf, 1.0, 2.0], [-jnp.inf, 5.0, jnp.nan]])
    assert viz.plot_scores(scores, ax=ax) is ax
    drawn = ax.images[0].get_array()
    np.testing.assert_array_equal(drawn.filled(-1), [[-1, -1], [1, 5], [2, -1]])
    assert ax.images[0].get_clim() == (1, 5)  # infinity does not stretch the colours
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("decode step", "logical page")
    assert ax.images[0].colorbar.ax.get_ylabel() == "score"


def test_scores_of_which_none_is_finite(ax):
    viz.plot_scores(np.full((2, 3), -np.inf), ax=ax)  # no step outgrew its budget
    ax.figure.canvas.draw()
    assert ax.images[0].get_array().mask.all()


def test_heatmaps_put_steps_and_pages_where_their_axes_say(ax):
    viz.plot_scores(np.arange(6.0).reshape(3, 2), ax=ax)
    image = ax.images[0]
    assert image.get_extent() == [0.5, 3.5, -0.5, 1.5] and image.origin == "lower"


def test_selections(ax):
    no_page = 40
    pages = jnp.array([[0, 2, no_page], [1, 2, 3]], jnp.int32)
    assert viz.plot_selections(pages, 4, ax=ax) is ax
    np.testing.assert_array_equal(ax.images[0].get_array(), [[1, 0], [0, 1], [1, 1], [0, 1]])


def test_page_table(ax, table):
    assert viz.plot_page_table(table, ax=ax) is ax
    assert ax.get_title() == "15 of 20 pages free"
    boxes, filled = ax.patches[:20], ax.patches[20:]
    assert len({box.get_xy() for box in boxes}) == 20
    assert boxes[15].get_xy() == (15, 0) and boxes[16].get_xy() == (0, 1)  # lines of 16
    # What lies on each owned page: its label, and the share that is filled.
    owned = {(int(text.get_position()[0]), int(text.get_position()[1])): text.get_text() for text in ax.texts}
    share = {patch.get_xy(): round(patch.get_width() / boxes[0].get_width(), 6) for patch in filled}
    expected = {}
    for row, length in ((1, 6), (2, 11)):
        for logical, page in enumerate(table.pages[row, : table.pages_in_use[row]].tolist()):
            expected[page, 0] = (f"{row}:{logical}", min(length - 4 * logical, 4) / 4)
    assert {place: (owned[place], share[place]) for place in owned} == expected
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "row 1: 6 tokens",
        "row 2: 11 tokens",
    ]
    assert len({patch.get_facecolor() for patch in filled}) == 2


def test_an_axes_is_made_where_none_is_given(table):
    axes = [
        viz.plot_scores(np.ones((2, 2))),
        viz.plot_selections(np.zeros((2, 1), int), 3),
        viz.plot_page_table(table),
    ]
    assert len({ax.figure for ax in axes}) == 3


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: viz.plot_scores(np.zeros(3)), r"scores: expected \[S, M\], none of them 0, got shape \[3\]"),
        (lambda: viz.plot_scores(np.zeros((0, 3))), r"scores: .* got shape \[0, 3\]"),
        (
            lambda: viz.plot_selections(np.zeros((2, 1, 3), int), 4),
            r"pages: expected \[S, W\], .* got shape \[2, 1, 3\]",
        ),
        (lambda: viz.plot_selections(np.zeros((2, 3)), 4), "pages: expected integers, got float64"),
        (lambda: viz.plot_selections(np.zeros((2, 3), int), 0), "num_logical: expected at least 1, got 0"),
        (lambda: viz.plot_page_table(np.zeros((2, 3))), "table: expected a PageTable, got ndarray"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    assert not plt.get_fignums()  # nothing was begun


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "h2o_jax.viz")
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(
        ImportError, match=r"h2o_jax.viz needs matplotlib: pip install 'h2o-jax\[notebooks\]'"
    ):
        import h2o_jax.viz  # noqa: F401
