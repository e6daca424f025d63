"""Answers a second, and what folding, sorting and batching buy."""

import contextlib
from unittest import mock

import torch

import batches
import generate
from benchmarks.measure import ratio, shown, spread, store_and_print, time_variants
from benchmarks.shapes import load
from runtime import processes


def used_adapter(model):
    """B is zero in a new adapter, which would make folding look free: small random numbers."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=1e-3)


def answer_in_order(model, prompts, max_new_tokens, batch_size, sort=True, **options):
    """An answer to every prompt by `generate`, [(tokens, complete)]; `sort=False`: as they come."""
    end = model.get_input_embeddings().num_embeddings - 1
    # In batches of its own the order given is the order kept: nothing is sorted.
    size = len(prompts) if sort else batch_size
    return [made for start in range(0, len(prompts), size) for made in generate.generate(
        model, prompts[start:start + size],
        [str(i) for i in range(start, min(start + size, len(prompts)))],
        max_new_tokens=max_new_tokens, temperature=0.8, end_ids=[end], batch_size=batch_size,
        **options)]


def generation_variants(model, prompts, max_new_tokens, full):
    """{name: callable that returns the answers}. full: answers at a time."""
    def call(batch_size, **options):
        return lambda: answer_in_order(model, prompts, max_new_tokens, batch_size, **options)

    def not_folded():  # the adapter stays beside the base weights
        with mock.patch.object(generate, "folded", lambda model: contextlib.nullcontext()):
            return call(full)()

    variants = {"as it is": call(full), "adapter not folded": not_folded,
                "prompts not sorted": call(full, sort=False), "batch of 8": call(8),
                "one by one": call(1)}
    if model.device.type == "cuda":
        variants["dynamic cache, not compiled"] = call(full, static_cache=False)
    return variants


def compare_answers(variants, rounds, device):
    """{variant: seconds, tokens/s, share of answers equal to the first variant's}."""
    answers = {}
    seconds = time_variants({name: lambda _, name=name, call=call: answers.update({name: call()})
                       for name, call in variants.items()}, rounds, device, "generate")
    first, results = next(iter(variants)), {}
    for name, made in answers.items():
        tokens = sum(len(answer) for answer, _ in made)
        equal = sum(a == b for a, b in zip(made, answers[first], strict=True))
        results[name] = {"seconds": spread(seconds[name]), "tokens": tokens,
                         "tokens_per_second": spread([tokens / s for s in seconds[name]]),
                         "ratio_to_as_it_is": ratio(seconds[name], seconds[first]),
                         "equal_answers": equal / len(made)}
    return results


def bench_generate(args):
    device = processes.pick_device(args.device)
    model, rows, _ = load(args, device, args.prompts)
    used_adapter(model)
    prompts = [batches.prompt_of(row) for row in rows]
    variants = generation_variants(model, prompts, args.max_new_tokens, args.generation_batch)
    results = compare_answers(variants, args.rounds, device)
    rows = [[name, shown(entry["tokens_per_second"]), shown(entry["ratio_to_as_it_is"]),
             f"{round(entry['equal_answers'] * len(prompts))}/{len(prompts)}"]
            for name, entry in results.items()]
    store_and_print(args, device, {"prompts": len(prompts), "new tokens": args.max_new_tokens,
                          "batch": args.generation_batch, "rounds": args.rounds}, results,
           ["variant", "tokens/s", "time of the first", "answers equal"], rows)
