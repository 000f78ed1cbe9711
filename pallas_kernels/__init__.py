"""GPU kernels for sparse decode attention over a paged pool: arrays in, arrays out.

Each op has a definition in plain `jax.numpy` ("xla") and takes `implementation=`. None of them knows of
policies or modules; `h2o_jax` is built on them.
"""

from pallas_kernels.decayed_softmax_scores import decayed_softmax_scores
from pallas_kernels.envelope_scores import envelope_scores
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.top_k_pages import top_k_pages
from pallas_kernels.write_pages import write_pages

__all__ = [
    "decayed_softmax_scores",
    "envelope_scores",
    "paged_attention",
    "top_k_pages",
    "write_pages",
]
