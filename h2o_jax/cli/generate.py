"""`h2o-jax generate`: text from a model whose decode steps read only the pages a policy chooses."""

import argparse
import contextlib
import dataclasses
import os
import sys
import time

import numpy as np

from h2o_jax.cli.files import add_model_option, path_option, read_option
from h2o_jax.cli.policy_options import add_policy_options, policy_from_options
from h2o_jax.generate import GenerationLoop, check_options
from h2o_jax.models import StreamDecoder, load
from h2o_jax.policy import get_policy
from h2o_jax.teacher_forcing import agreement, teacher_forced_logits
from pallas_kernels._dispatch import require_runnable

TOKENS_A_PRINT = 4  # decode steps between two looks at what was generated


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declares the command and its options."""
    parser = subparsers.add_parser(
        "generate",
        help="generate text",
        description="Generates text, on standard output, and says on standard error what it cost.",
    )
    parser.set_defaults(run=run)
    add_model_option(parser)
    parser.add_argument("--prompt", help="what to say to the model; after the text of --prompt-file if both")
    parser.add_argument("--prompt-file", type=path_option, help="a UTF-8 text file to start from")
    parser.add_argument(
        "--raw", action="store_true", help="continue the text as it is, without the model's chat template"
    )
    add_policy_options(parser)
    parser.add_argument("--max-new-tokens", type=int, default=64, help="default 64")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): the most likely token")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample from this much probability; default 1")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling; default 0")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on a CPU")
    parser.add_argument("--implementation", choices=("xla", "pallas", "pallas_interpret"), help="default: best here")
    parser.add_argument(
        "--compare", action="store_true", help="also run dense attention and say how far the two agree"
    )


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished generation.

    Attributes:
        tokens: the new tokens.
        compile_seconds, prefill_seconds, decode_seconds: wall-clock time of each part.
    """

    tokens: list[int]
    compile_seconds: float
    prefill_seconds: float
    decode_seconds: float


def run(args: argparse.Namespace) -> int:
    """Runs the command; see `h2o-jax generate --help`."""
    from rich.console import Console

    policy, page_size = policy_from_options(args)
    check_options(args.max_new_tokens, args.temperature, args.top_p, args.seed)
    require_runnable(args.implementation)
    text = _prompt_text(args)
    console = Console(stderr=True)
    with _phase(console, "loading the model"):
        model, tokenizer = load(args.model, dtype=args.dtype)
    prompt = _encode(tokenizer, text, args.raw)
    options = dict(
        max_new_tokens=args.max_new_tokens,
        stop_tokens=tokenizer.eos_ids,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        page_size=page_size,
        implementation=args.implementation,
    )
    result = _generate(console, model, prompt, policy, options, StreamDecoder(tokenizer))
    read, cached = _pages(result, len(prompt), policy, page_size, model.config.num_layers)
    budget = policy.budget(-(-(len(prompt) + len(result.tokens) - 1) // page_size))
    _say(_report(result, len(prompt), read, cached, budget, page_size))
    if args.compare and read == cached:
        _say("\nnot compared with dense attention: each step read all cached pages, as that does")
    elif args.compare:
        dense_policy = get_policy("dense_attention")
        dense = _generate(console, model, prompt, dense_policy, options, None)
        with _phase(console, "comparing the two, token by token"):
            logits = [
                teacher_forced_logits(
                    model,
                    prompt,
                    dense.tokens,
                    policy=each,
                    page_size=page_size,
                    implementation=args.implementation,
                )
                for each in (dense_policy, policy)
            ]
        _say(_comparison(result, dense, agreement(*logits)))
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _phase(console, text: str) -> contextlib.AbstractContextManager:
    """Says what takes its time now: beside a spinner that ends with it on a terminal, else in a line."""
    if console.is_terminal:
        return console.status(text)
    _say(text)
    return contextlib.nullcontext()


def _prompt_text(args: argparse.Namespace) -> str:
    parts = []
    if args.prompt_file is not None:
        parts.append(read_option("--prompt-file", args.prompt_file))
    if args.prompt is not None:
        parts.append(args.prompt)
    text = "\n\n".join(parts)
    if not text.strip():
        raise ValueError("the prompt is empty: give --prompt or --prompt-file with some text")
    return text


def _encode(tokenizer, text: str, raw: bool) -> list[int]:
    if raw or not tokenizer.chat_template:
        return tokenizer.encode(text)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    return tokenizer.encode(chat, add_special_tokens=False)


def _generate(console, model, prompt, policy, options, decoder) -> Run:
    """Generates, printing the text as it comes where there is a `decoder`."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    loop = GenerationLoop(model, [prompt], policy=policy, **options)
    begin = time.perf_counter()
    with _phase(console, "compiling"):
        loop.compile()
    compiled = time.perf_counter()
    columns = TextColumn("prefill"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn()
    if not console.is_terminal:
        _say(f"prefill of {len(prompt)} tokens")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("prefill", total=len(prompt))
        for done in loop.prefill():
            bar.update(task, completed=done)
    prefilled = time.perf_counter()
    with contextlib.nullcontext() if decoder else _phase(console, "decoding with dense attention"):
        while True:  # the first token is there after the prefill, and may be the only one
            tokens = loop.decode(TOKENS_A_PRINT if decoder else None)[0]
            if decoder:
                print("".join(decoder.push(token) for token in tokens), end="", flush=True)
            if loop.finished:
                break
    if decoder:
        print(decoder.flush())
    decoded = time.perf_counter()
    return Run(loop.tokens[0], compiled - begin, prefilled - compiled, decoded - prefilled)


def _pages(result: Run, prompt_length: int, policy, page_size: int, num_layers: int) -> tuple[int, int]:
    """Pages read, and pages cached, in all layers and decode steps."""
    cached = -(-(prompt_length + np.arange(1, len(result.tokens))) // page_size)  # in use at each step
    longest = int(cached.max(initial=0))
    budgets = [policy.for_layer(layer).budget(longest) for layer in range(num_layers)]
    return int(sum(np.minimum(cached, budget).sum() for budget in budgets)), int(cached.sum()) * num_layers


def _report(result: Run, prompt_length: int, read: int, cached: int, budget: int, page_size: int) -> str:
    new = len(result.tokens)
    share = f"{read / cached:.1%} of pages cached" if cached else "no decode step"
    return (
        f"\nprefill  {prompt_length} tokens, {prompt_length / result.prefill_seconds:.1f} tokens/s\n"
        f"decode   {new} tokens, {max(new - 1, 0) / result.decode_seconds:.1f} tokens/s"
        f" (compilation {result.compile_seconds:.1f} s, not counted)\n"
        f"read     {read} pages of {cached} cached, all layers and steps: {share}\n"
        f"budget   {budget} pages of {page_size} = {budget * page_size} tokens a step"
    )


def _comparison(result: Run, dense: Run, agreed) -> str:
    shared = len(os.path.commonprefix([result.tokens, dense.tokens]))
    return (
        f"\ncompared with dense attention\n"
        f"common prefix         {shared} of {len(dense.tokens)} tokens\n"
        f"top-1 agreement       {agreed.top1:.1%}, teacher-forced on the dense text\n"
        f"mean KL(dense, this)  {agreed.mean_kl:.4f} nats\n"
        f"dense decode          {max(len(dense.tokens) - 1, 0) / dense.decode_seconds:.1f} tokens/s"
    )
