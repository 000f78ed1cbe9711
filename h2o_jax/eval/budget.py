"""Policies at equal budgets of tokens, whatever their page size."""

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from h2o_jax.eval.baselines import OraclePolicy, RandomPolicy
from h2o_jax.policy import Policy, get_policy, list_policies, policy_class, reserved_pages

BASELINES: dict[str, type[Policy]] = {"random": RandomPolicy, "oracle": OraclePolicy}
DENSE = "dense_attention"
_SET_BY_BUDGET = ("top_k", "reserved_bos", "reserved_eos", "dense_layers")


def policy_names() -> tuple[str, ...]:
    """Names that can be evaluated: the registered policies and the baselines."""
    return (*list_policies(), *BASELINES)


def fits_page_size(name: str, page_size: int) -> bool:
    """Whether the policy of that name can run with pages of that many tokens.

    Raises:
        ValueError: an unknown name (the message lists the names).
    """
    return name in BASELINES or policy_class(name).page_size in (None, page_size)


def policy_at(name: str, options: Mapping[str, Any], page_size: int, budget: int) -> Policy:
    """The policy that reads `budget` tokens a step: 16 in leading pages, 32 in trailing ones, others chosen.

    Reserved pages are rounded up to whole ones and counted in the budget. What `sink_recent_attention` could
    choose goes to its trailing pages. The dense policy has no budget.

    Args:
        name: one of `policy_names()`.
        options: the policy's own options, such as `decay`.
        page_size: tokens of a page.
        budget: tokens, a multiple of `page_size`.

    Raises:
        ValueError: an unknown name or option, a wrong value, or a budget too small to choose a page.
    """
    given = [option for option in options if option in _SET_BY_BUDGET]
    if given:
        raise ValueError(f"{name}: option {given[0]!r} is set by the budget, or not for evaluation")
    if name == DENSE:
        return get_policy(name, **options)
    bos, eos = reserved_pages(page_size)
    top_k = budget // page_size - bos - eos
    if top_k < 1:
        raise ValueError(
            f"budgets: expected at least {(bos + eos + 1) * page_size} tokens with pages of {page_size}, "
            f"of which {(bos + eos) * page_size} are reserved; got {budget}"
        )
    if name in BASELINES:
        try:
            return BASELINES[name](top_k, bos, eos, **options)
        except TypeError:
            raise ValueError(f"{name}: unknown option among {', '.join(options)}") from None
    if policy_class(name).least_top_k == 0:
        return get_policy(name, reserved_bos=bos, reserved_eos=eos + top_k, **options)
    return get_policy(name, top_k=top_k, reserved_bos=bos, reserved_eos=eos, **options)


def budget_tokens(budgets: Iterable[Fraction | int], context: int, page_sizes: Sequence[int]) -> list[int]:
    """Budgets in tokens. A fraction of the context is rounded down to a multiple of all page sizes, so that
    all read the same number of tokens.

    Raises:
        ValueError: a page size that is not positive, a number of tokens that is not such a multiple, or a
            budget that is not below the context.
    """
    if min(page_sizes) < 1:
        raise ValueError(f"page_sizes: expected positive integers, got {min(page_sizes)}")
    step = math.lcm(*page_sizes)
    tokens = []
    for budget in budgets:
        number = int(budget * context) // step * step if isinstance(budget, Fraction) else budget
        if number % step or not 0 < number < context:
            raise ValueError(
                f"budgets: expected fractions below 1, or numbers of tokens below the context of {context} "
                f"that are multiples of {step}, for page sizes {', '.join(map(str, page_sizes))}; "
                f"got {budget}"
            )
        tokens.append(number)
    return tokens
