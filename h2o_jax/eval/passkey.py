"""Whether a number hidden in a long text is found again.

Letters: R rows, n decode steps.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from h2o_jax.eval.forced import decode
from h2o_jax.eval.layerwise import Layerwise
from h2o_jax.eval.prefix import Prefix, prefill
from h2o_jax.models import Tokenizer
from h2o_jax.policy import Policy

DEPTHS = (0, 25, 50, 75, 100)  # percent of the filler before the number
QUESTION_TOKENS = 64  # room for question, template and answer
_NEEDLE = "\n\nThe pass key is {number}. Remember it. {number} is the pass key.\n\n"
_QUESTION = "What is the pass key?"
_LEAD = "The pass key is "
_DIGITS = 5
_BOUNDARY = re.compile(r"[.!?]\s+|\n\s*\n")


class Passkeys:
    """Texts with a number each, prefilled once; then a question and the number, token by token.

    The question comes after the prefill so that a policy meets it in sparse steps. It is fed in full, and the
    number as well: all its tokens are the most likely ones exactly where greedy decoding would write it.

    Args:
        model: the model.
        tokenizer: of the model; with a chat template, text and question are the user's turn.
        text: the filler.
        context: about how many tokens the prefill has, one row a little more or less than another.
        rows: numbers at each depth.
        progress: see `prefill`.

    Raises:
        ValueError: a filler too short for passages that differ, or a question that does not fit its room.
    """

    def __init__(
        self,
        model: Layerwise,
        tokenizer: Tokenizer,
        text: str,
        context: int,
        rows: int,
        progress: Callable[[int], None],
    ):
        filler, passages = tokenizer.encode(text, add_special_tokens=False), rows * len(DEPTHS)
        need = context + passages - 1
        if len(filler) < need:
            raise ValueError(
                f"text: expected at least {need} tokens for {passages} passages of {context}, "
                f"got {len(filler)}"
            )
        self._model, depths = model, np.repeat(DEPTHS, rows)
        rng = np.random.default_rng(0)
        starts = np.linspace(0, len(filler) - context, len(depths)).astype(int)
        prompts, forced, self._answers = [], [], []
        for start, depth in zip(starts, depths):
            number = str(rng.integers(10 ** (_DIGITS - 1), 10**_DIGITS))
            prompt, question, answer = hide(tokenizer, filler[start : start + context], depth / 100, number)
            prompts.append(prompt)
            forced.append([*question, *answer])
            self._answers.append(len(answer))
        self._tokens = np.zeros((len(forced), max(map(len, forced))), np.int32)
        for row, tokens in zip(self._tokens, forced):
            row[: len(tokens)] = tokens
        self._counts = np.array([len(tokens) - 1 for tokens in forced])
        if self._tokens.shape[1] > QUESTION_TOKENS:
            raise ValueError(
                f"question: expected at most {QUESTION_TOKENS} tokens with this model's template, "
                f"got {self._tokens.shape[1]}"
            )
        self._prefix: Prefix = prefill(model, prompts, progress)

    def compile(self, policy: Policy, page_size: int) -> None:
        """Compiles what `measure` takes."""
        self._prefix.compile(self._model, policy, page_size, self._tokens.shape[1] - 1)

    def measure(self, policy: Policy, page_size: int) -> dict[str, Any]:
        """The share of numbers found, "accuracy", and by depth in percent, "accuracy_by_depth"."""
        state = self._prefix.state_for(policy, page_size, self._tokens.shape[1] - 1)
        _, predictions, _ = decode(self._model, state, self._tokens, self._counts, policy=policy)
        correct = np.where(np.isfinite(predictions.surprise), predictions.correct, np.nan)
        return accuracy(correct, self._counts, self._answers)


def accuracy(correct: np.ndarray, counts: np.ndarray, answers: list[int]) -> dict[str, Any]:
    """What share of the rows predicted their whole answer; as many rows for each of `DEPTHS`, in order.

    Args:
        correct: [n, R], whether each prediction was right; NaN where that can't be said.
        counts: [R], predictions of each row.
        answers: how many of them, the last ones, are of the answer.
    """
    rows = enumerate(zip(counts, answers, strict=True))
    found = [correct[count - answer : count, row].min() for row, (count, answer) in rows]
    by_depth = np.reshape(found, (len(DEPTHS), -1)).mean(axis=1)
    return {
        "accuracy": float(np.mean(found)),
        "accuracy_by_depth": {str(depth): float(share) for depth, share in zip(DEPTHS, by_depth)},
    }


def hide(
    tokenizer: Tokenizer, filler: list[int], depth: float, number: str
) -> tuple[list[int], list[int], list[int]]:
    """Hides a number in a filler.

    Args:
        tokenizer: of the model.
        filler: token ids, of which as many are left out as the number and the template take.
        depth: share of the filler that comes before the number, which goes to the nearest end of a sentence.
        number: what to hide.

    Returns:
        Token ids of the text, of the question with the beginning of its answer, and of the number.
    """
    needle = _NEEDLE.format(number=number)
    room = len(filler) - len(tokenizer.encode(needle)) - QUESTION_TOKENS
    body = tokenizer.decode(filler[:room])
    ends = [0, *(match.end() for match in _BOUNDARY.finditer(body)), len(body)]
    place = min(ends, key=lambda end: abs(end - depth * len(body)))
    body = (body[:place].rstrip() + needle + body[place:].lstrip()).strip()
    if tokenizer.chat_template:
        user = [{"role": "user", "content": f"{body}\n\n{_QUESTION}"}]
        chat = tokenizer.apply_chat_template(user, add_generation_prompt=True)
        cut = chat.rindex(_QUESTION)
        prompt, question = tokenizer.encode(chat[:cut], add_special_tokens=False), chat[cut:] + _LEAD
    else:
        prompt, question = tokenizer.encode(f"{body}\n\n"), f"{_QUESTION} {_LEAD}"
    asked, answered = (tokenizer.encode(question + end, add_special_tokens=False) for end in ("", number))
    shared = next((i for i, (a, b) in enumerate(zip(asked, answered)) if a != b), len(asked))
    return prompt, answered[:shared], answered[shared:]
