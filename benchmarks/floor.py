"""How far a forward and a LoRA step are above the matrix products that they must do.

The floor is counted in the same run, with the model's own weights, at its dtype and on as many
tokens: every linear layer's product on all tokens, the head's on those with a target; of a step
also the gradient of what each layer reads. Adapters, attention, norms, rotations, the softmax and
the optimiser are above the floor. Nothing is kept of the products.
"""

import time

import torch

import batches
import models
from benchmarks.measure import peak_memory, ratio, shown, spread, store_and_print, time_variants
from benchmarks.shapes import load
from logprobs import sequence_logprobs
from runtime import processes


def product_variants(model, batch):
    """{"forward", "step": callable of the round}: the products alone."""
    causal_lm = models.bare(model)
    head = causal_lm.get_output_embeddings().weight
    weights = [m.weight for name, m in causal_lm.named_modules()
               if isinstance(m, torch.nn.Linear) and "lora_" not in name and m.weight is not head]
    tokens = batch["input_ids"].numel()
    jobs = [(tokens, weight) for weight in weights] + [(int(batch["response_mask"].sum()), head)]
    made = {(count, width): torch.randn(count, width, device=head.device).to(head.dtype)
            for count, weight in jobs for width in weight.shape}

    def forward(_):
        for count, weight in jobs:
            made[count, weight.shape[1]] @ weight.T

    def step(turn):
        forward(turn)
        for count, weight in jobs:
            made[count, weight.shape[0]] @ weight

    return {"forward": forward, "step": step}


def model_variants(model, batch):
    """{"forward", "step": callable of the round} as training runs them; the rate of theta is 0."""
    theta = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(theta, lr=0.0)

    def forward(_):
        with torch.no_grad():
            sequence_logprobs(model, batch)

    def step(_):
        logps, lengths = sequence_logprobs(model, batch)
        (-logps / lengths).mean().backward()
        models.update(theta, optimizer, 1.0)

    return {"forward": forward, "step": step}


def token_rates(model, batch):
    """Tokens/s of {"forward", "step"} of a packed batch: the faster of two calls behind a first."""
    seconds = time_variants(model_variants(model, batch), 2, model.device, "rates")
    return {name: batch["input_ids"].numel() / min(own) for name, own in seconds.items()}


def measured_floors(model, batch, rounds, device):
    """{"forward", "step": figures} of one model; ratios are taken inside a round.

    Beside the clock's ratio that of processor time, which other programs on the machine move less.
    """
    variants, processor = model_variants(model, batch), {}
    peaks = {name: peak_memory(lambda call=call: call(0), device)
             for name, call in variants.items()}
    variants |= {f"{name}: floor": call for name, call in product_variants(model, batch).items()}

    def counted(name, call):
        def run(turn):
            started = time.process_time()
            call(turn)
            processor.setdefault(name, []).append(time.process_time() - started)
        return run

    seconds = time_variants({name: counted(name, call) for name, call in variants.items()}, rounds,
                            device, "floor")
    processor = {name: values[1:] for name, values in processor.items()}  # the first warms up
    tokens = batch["input_ids"].numel()
    return {name: {"seconds": spread(seconds[name]), "processor": spread(processor[name]),
                   "floor_seconds": spread(seconds[f"{name}: floor"]), "peak_bytes": peaks[name],
                   "tokens_per_second": spread([tokens / s for s in seconds[name]]),
                   "ratio": ratio(seconds[name], seconds[f"{name}: floor"]),
                   "processor_ratio": ratio(processor[name], processor[f"{name}: floor"])}
            for name in peaks}


def bench_floor(args):
    device = processes.pick_device(args.device)
    model, lower, upper = load(args, device, args.batch)
    batch = batches.pack(batches.sequences(lower + upper), device)
    results = measured_floors(model, batch, args.rounds, device)
    settings = {"rows of each level": args.batch, "tokens": batch["input_ids"].numel(),
                "with a target": int(batch["response_mask"].sum()), "rounds": args.rounds,
                "dtype": str(models.bare(model).dtype).removeprefix("torch.")}
    store_and_print(args, device, settings, results,
                    ["", "tokens/s", "of the floor", "in processor time", "peak MiB"],
                    [[name, f"{entry['tokens_per_second']['median']:.0f}", shown(entry["ratio"]),
                      shown(entry["processor_ratio"]),
                      entry["peak_bytes"] and f"{entry['peak_bytes'] / 2**20:.0f}"]
                     for name, entry in results.items()])
