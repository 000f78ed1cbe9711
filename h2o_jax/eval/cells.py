"""What is evaluated: one cell is one policy with one page size and budget in one task."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from h2o_jax.eval.budget import DENSE, fits_page_size, policy_at, policy_names
from h2o_jax.generate import DEFAULT_PAGE_SIZE
from h2o_jax.policy import Policy

PERPLEXITY, COVERAGE, PASSKEY = TASKS = ("perplexity", "coverage", "passkey")


@dataclasses.dataclass(frozen=True)
class PolicySpec:
    """A policy's name and options of its own, as `NAME` or `NAME:option=value,option=value`.

    Attributes:
        name: one of `policy_names()`.
        options: pairs of name and value, sorted.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "PolicySpec":
        """Reads the form that `str` writes.

        Raises:
            ValueError: an unknown name, or options that are not pairs.
        """
        name, _, rest = text.partition(":")
        if name not in policy_names():
            raise ValueError(f"policies: expected some of {', '.join(policy_names())}, got {name!r}")
        pairs = [pair.partition("=") for pair in rest.split(",") if pair]
        if not all(key and value for key, _, value in pairs):
            raise ValueError(f"policies: expected a form like {name}:option=value,option=value, got {text!r}")
        return cls(name, tuple(sorted((key, _value(value)) for key, _, value in pairs)))

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options)
        return f"{self.name}:{options}" if options else self.name


def _value(text: str) -> Any:
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        task: one of `TASKS`.
        policy: which policy.
        page_size: tokens of a page.
        budget: tokens read in a step; of the dense policy, the context.
    """

    task: str
    policy: PolicySpec
    page_size: int
    budget: int

    def __str__(self) -> str:
        return f"{self.task} {self.policy} P={self.page_size} {self.budget} tokens"

    def key(self) -> dict[str, Any]:
        """The fields, as JSON holds them."""
        return {
            "task": self.task,
            "policy": self.policy.name,
            "options": dict(self.policy.options),
            "page_size": self.page_size,
            "budget": self.budget,
        }

    def resolve(self) -> Policy:
        """The policy itself; ValueError where there is none such."""
        return policy_at(self.policy.name, dict(self.policy.options), self.page_size, self.budget)


def grid(
    tasks: Sequence[str],
    policies: Sequence[PolicySpec],
    page_sizes: Iterable[int],
    budgets: Sequence[int],
    context: int,
) -> list[Cell]:
    """All combinations that exist, in the order of `TASKS`, the dense policy first.

    Dense attention has one page size and one budget, and covers everything by definition. A policy that needs
    a page size runs with that one alone.

    Raises:
        ValueError: an unknown task, a wrong option or value, or a budget too small for a page size.
    """
    cells = []
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"TASK: expected some of {', '.join(TASKS)}, got {task!r}")
    for task in (task for task in TASKS if task in tasks):
        dense = [spec for spec in policies if spec.name == DENSE and task != COVERAGE]
        cells += [Cell(task, spec, DEFAULT_PAGE_SIZE, context) for spec in dense]
        cells += [
            Cell(task, spec, page_size, budget)
            for page_size in page_sizes
            for budget in budgets
            for spec in policies
            if spec.name != DENSE and fits_page_size(spec.name, page_size)
        ]
    cells = list(dict.fromkeys(cells))
    for cell in cells:
        cell.resolve()
    return cells
