"""The options that name a policy on the command line."""

import argparse

from h2o_jax.generate import DEFAULT_PAGE_SIZE
from h2o_jax.policy import Policy, get_policy, list_policies, policy_class, reserved_pages

DEFAULT_BUDGET = 512  # tokens


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Declares `--policy` and its options."""
    parser.add_argument(
        "--policy", default="gqa_h2o_sparse_attention", help=f"default %(default)s; one of {', '.join(list_policies())}"
    )
    parser.add_argument("--page-size", type=int, help="tokens a page; default 16, for token policies 1")
    parser.add_argument(
        "--top-k", type=int, help=f"pages chosen by score; default {DEFAULT_BUDGET} tokens less the reserved ones"
    )
    bos, eos = reserved_pages(1)
    parser.add_argument("--reserved-bos", type=int, help=f"leading pages always read; default {bos} tokens")
    parser.add_argument("--reserved-eos", type=int, help=f"trailing pages always read; default {eos} tokens")
    parser.add_argument(
        "--dense-layers", type=_layers, default=(), help="layers that read all pages, such as 0,1; default none"
    )


def policy_from_options(args: argparse.Namespace) -> tuple[Policy, int]:
    """The policy that the options name, and the page size.

    Raises:
        ValueError: an unknown policy or a wrong value; the message names it.
    """
    cls = policy_class(args.policy)
    page_size = (cls.page_size or DEFAULT_PAGE_SIZE) if args.page_size is None else args.page_size
    if page_size < 1 or cls.page_size not in (None, page_size):
        expected = "a positive integer" if cls.page_size is None else f"{cls.page_size} for {args.policy}"
        raise ValueError(f"page_size: expected {expected}, got {page_size}")
    bos, eos = reserved_pages(page_size)
    reserved_bos = bos if args.reserved_bos is None else args.reserved_bos
    reserved_eos = eos if args.reserved_eos is None else args.reserved_eos
    options = dict(reserved_bos=reserved_bos, reserved_eos=reserved_eos, dense_layers=args.dense_layers)
    if args.top_k is not None:
        options["top_k"] = args.top_k
    elif cls.least_top_k > 0:
        options["top_k"] = max(DEFAULT_BUDGET // page_size - reserved_bos - reserved_eos, 1)
    return get_policy(args.policy, **options), page_size


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(layer) for layer in text.split(",") if layer.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected layers such as 0,1, got {text!r}") from None
