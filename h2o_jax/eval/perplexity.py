"""What a policy costs in the prediction of a text."""

from typing import Any

import numpy as np

from h2o_jax.eval.forced import Predictions


def summarise(predictions: Predictions) -> dict[str, Any]:
    """Means over steps and windows.

    Returns:
        "perplexity"; "kl", mean KL(dense || policy) in nats; "top1", share of steps whose most likely token
        is that of dense attention; "kl_by_step", the mean over windows at each step since the prefill;
        "kl_by_window", the mean over steps of each window, for the spread between texts.
        Where logits are not finite, neither are these.
    """
    return {
        "perplexity": float(np.exp(predictions.surprise.mean(dtype=np.float64))),
        "kl": float(predictions.kl.mean(dtype=np.float64)),
        "top1": float(np.where(np.isfinite(predictions.kl), predictions.same, np.nan).mean()),
        "kl_by_step": predictions.kl.mean(axis=1, dtype=np.float64).tolist(),
        "kl_by_window": predictions.kl.mean(axis=0, dtype=np.float64).tolist(),
    }
