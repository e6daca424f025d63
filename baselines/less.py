"""LESS (Xia et al. 2024): how far an Adam step on a row lowers the upper loss, see `less_scores`.

Deviations, each with its reason:
 1. LoRA on every linear layer and no dropout, as in training here, where the authors adapt
    attention alone with dropout 0.1. `--lora-rank 128 --lora-alpha 512` are theirs.
 2. The warm-up is plain Adam without weight decay, gradients clipped at norm 1.
 3. The authors pick the top 5 %; here --keep-fraction decides, as for every method.
 4. Gradients are not projected. The authors store a projection of every row's, to use it again for
    other upper rows. Here each is compared as it comes with the mean of the upper rows' unit
    gradients, which is all that the score needs. Exact, and of a checkpoint the disk holds 3 P
    numbers and P for each group, whatever the number of rows.
"""

import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from tqdm import tqdm

import batches
import models
import train_offline
import utils
from data import sets
from logprobs import sequence_logprobs
from runtime import folder, processes
from utils import UserError

ROWS_A_SAVE = 256  # what a kill costs after the warm-up, at most


def adam_direction(gradient, m, v):
    """Gamma = m' / sqrt(v' + 1e-8) after one more Adam step on `gradient`; (..., P), m and v (P,).

    As LESS has it: the epsilon inside the root, no bias correction, betas (0.9, 0.999).
    """
    v = gradient.square().mul_(0.001).add_(v, alpha=0.999)  # in place: (..., P) is large
    m = (0.1 * gradient).add_(m, alpha=0.9)
    return m.div_(v.add_(1e-8).sqrt_())


def row_gradients(model, theta, rows):
    """Gradient of every row's mean response loss over the adapter, (n, P), by one backward.

    Rows are packed. With X_i the inputs of a LoRA layer s B A that belong to row i, and G_i the
    gradients of its outputs: dL_i/dB = s G_i^T (X_i A^T), dL_i/dA = s (G_i B)^T X_i.
    """
    inputs, outputs = {}, {}

    def watch(layer, arguments, output):
        if layer not in outputs:  # not again when a checkpointed forward is repeated
            inputs[layer], outputs[layer] = arguments[0].detach()[0], output

    hooks = [layer.register_forward_hook(watch) for layer in model.modules()
             if hasattr(layer, "lora_A")]
    batch = batches.pack(rows, model.device)
    try:
        logps, lengths = sequence_logprobs(model, batch)
        gradients = torch.autograd.grad((-logps / lengths).sum(), list(outputs.values()))
    finally:
        for hook in hooks:
            hook.remove()
    starts = batch["cu_seqlens"].long()
    place = torch.arange(starts.diff().max(), device=starts.device)
    inside = place < starts.diff()[:, None]                                  # (n, longest)
    index = torch.where(inside, starts[:-1, None] + place, 0)
    by_parameter = {}
    for layer, gradient in zip(outputs, gradients, strict=True):
        a, b = (part["default"].weight for part in (layer.lora_A, layer.lora_B))
        x = inputs[layer][index].to(a.dtype)
        g = (gradient[0][index] * inside[:, :, None]).to(a.dtype) * layer.scaling["default"]
        by_parameter[a] = (g @ b).transpose(1, 2) @ x
        by_parameter[b] = g.transpose(1, 2) @ (x @ a.T)
    return torch.cat([by_parameter[p].detach().flatten(1) for p in theta], dim=1)


def warm_up(model, theta, rows, work, *, fraction, epochs, batch, micro_batch, lr, seed):
    """Train the adapter on a random share of the rows; one checkpoint an epoch, in `work`.

    Returns the files. A checkpoint is theta, m, v, each (P,), and lr, the epoch's mean learning
    rate. All are taken as they are when none is missing, else the warm-up starts anew: the caller
    has checked that they come from the same arguments. fraction: share of the rows; batch: rows a
    step, micro_batch: rows a forward.
    """
    files = [work / f"warmup_{epoch}.safetensors" for epoch in range(epochs)]
    if all(file.exists() for file in files):
        return files
    count = max(1, round(fraction * len(rows)))
    chosen = batches.permutation(len(rows), seed, 0, stream=4)[:count]
    steps = math.ceil(count / batch)
    total, rising = steps * epochs, math.ceil(0.03 * steps * epochs)
    print(f"warm-up: {count} of {len(rows)} rows, {steps} steps of {batch} rows an epoch, "
          f"x {epochs} epochs = {total}")
    optimizer = torch.optim.Adam(theta, lr=lr)
    progress = tqdm(total=total, desc="less: warm-up", unit="step")
    for epoch, file in enumerate(files):
        order, rates = chosen[batches.permutation(count, seed, epoch, stream=5)], []
        for k in range(steps):
            step, members = epoch * steps + k, batches.take(rows, order[k * batch:][:batch])
            falling = (total - step) / max(1, total - rising)
            rates.append(lr * min((step + 1) / (rising + 1), falling))
            optimizer.param_groups[0]["lr"] = rates[-1]
            *_, norm = train_offline.descend(
                model, theta, optimizer, [], members, theta[0].new_ones(len(members)), 1.0,
                clip=1.0, micro_batch=micro_batch)
            if not torch.isfinite(norm):
                raise UserError(f"warm-up step {step}: the gradient is not finite; lower --lr")
            progress.update()
        state = [optimizer.state[p] for p in theta]
        utils.write_atomic(file, save({
            "theta": torch.cat([p.detach().flatten() for p in theta]).cpu(),
            "m": torch.cat([s["exp_avg"].flatten() for s in state]).cpu(),
            "v": torch.cat([s["exp_avg_sq"].flatten() for s in state]).cpu(),
            "lr": torch.tensor([sum(rates) / len(rates)], dtype=torch.float64)}))
    progress.close()
    return files


def unit_gradients(model, theta, rows, done, micro_batch, label, adam=None):
    """Unit gradients of the rows from row `done` on: (place of the first, (n, P) vectors, save).

    adam: (m, v) for lower rows, whose gradient becomes Adam's step; None for upper rows. save: the
    last of ROWS_A_SAVE rows, or of all. `micro_batch` rows are in memory at a time.
    """
    bar = tqdm(total=len(rows), initial=done, desc=f"less: {label}", unit="row", mininterval=1)
    while done < len(rows):
        border = min(len(rows), done - done % ROWS_A_SAVE + ROWS_A_SAVE)
        part = batches.take(rows, range(done, min(done + micro_batch, border)))
        vectors = row_gradients(model, theta, part)
        if adam is not None:
            vectors = adam_direction(vectors, *adam)
        norms = vectors.norm(dim=1, keepdim=True)
        if not torch.isfinite(norms).all():
            position = done + int((~torch.isfinite(norms)).nonzero()[0, 0])
            raise UserError(f"{label}: the gradient of row {position} is not finite")
        done += len(part)
        yield done - len(part), vectors.div_(norms.clamp_min(1e-30)), done == border
        bar.update(len(part))
    bar.close()


def upper_direction(model, theta, upper, member, file, micro_batch):
    """sum_{z'} member[j, z'] g(z') / |g(z')|, (J, P); goes on from what a killed run saved.

    member (J, rows): the share of every upper row in its group's mean, 0 in the other groups'.
    """
    size = sum(p.numel() for p in theta)
    saved = load_file(file) if file.exists() else {
        "done": torch.tensor(0), "sum": torch.zeros(len(member), size, dtype=theta[0].dtype)}
    total = saved["sum"].to(model.device, copy=True)  # a file's memory is not aligned: other sums
    member = member.to(total)
    for start, vectors, save_now in unit_gradients(
            model, theta, upper, int(saved["done"]), micro_batch, file.stem):
        done = start + len(vectors)
        total += member[:, start:done] @ vectors
        if save_now:
            utils.write_atomic(file, save({"done": torch.tensor(done), "sum": total.cpu()}))
    return total


def lower_cosines(model, theta, lower, direction, adam, file, micro_batch):
    """<Gamma(z) / |Gamma(z)|, direction_j> of every lower row, (N, J) float64; goes on, too."""
    saved = load_file(file)["cosines"] if file.exists() else torch.zeros(
        0, len(direction), dtype=torch.float64)
    parts = [saved]
    for _, vectors, save_now in unit_gradients(
            model, theta, lower, len(saved), micro_batch, file.stem, adam):
        parts.append((vectors @ direction.T).double().cpu())
        if save_now:
            parts = [torch.cat(parts)]
            utils.write_atomic(file, save({"cosines": parts[0]}))
    return parts[0]


def less_scores(model, theta, lower, upper, groups, files, work, micro_batch):
    """LESS: s(z) = max over groups j of mean over upper rows z' in j of sum_i w_i cos_i(z, z').

    cos_i(z, z') = <Gamma_i(z), g_i(z')> of the unit vectors at checkpoint i: Adam's step on the
    lower row z against the plain gradient of the upper row z'. w_i is the epoch's mean learning
    rate, normalised to sum one. groups: a name for each upper row; files: the checkpoints of
    `warm_up`. Returns (N,) float64.
    """
    names = sorted(set(groups))
    member = torch.tensor([[group == name for group in groups] for name in names]).double()
    member /= member.sum(dim=1, keepdim=True)
    checkpoints = [load_file(file) for file in files]
    rates = torch.cat([checkpoint["lr"] for checkpoint in checkpoints])
    scores = torch.zeros(len(lower), len(names), dtype=torch.float64)
    for i, (weight, state) in enumerate(zip(rates / rates.sum(), checkpoints, strict=True)):
        torch.nn.utils.vector_to_parameters(state["theta"].to(model.device), theta)
        adam = state["m"].to(model.device), state["v"].to(model.device)
        direction = upper_direction(model, theta, upper, member, work / f"upper_{i}.safetensors",
                                    micro_batch)
        scores += weight * lower_cosines(model, theta, lower, direction, adam,
                                         work / f"lower_{i}.safetensors", micro_batch)
    return scores.max(dim=1).values


def open_work(args, model, levels, groups):
    """The folder of what a killed run goes on from; `UserError` when it is another run's."""
    settings = ("seed", "epochs", "lr", "batch", "micro_batch", "warmup_fraction", "lora_rank",
                "lora_alpha", "dtype", "four_bit")
    config = {"args": {name: getattr(args, name) for name in settings},
              "data": {"model": folder.fingerprint(
                           dict(model.named_buffers()) | model.state_dict()),
                       "lower rows": sets.rows_hash(levels.lower),
                       "upper rows": sets.rows_hash(levels.upper),
                       "upper groups": utils.content_hash(*groups)}}
    work = Path(args.work or f"{args.out}.less")
    try:
        return folder.open_run(work, config, resume=True)
    except UserError as error:
        raise UserError(f"{error}; or name another --work" + (
            f", or remove {work}" if "cannot resume" in str(error) else "")) from None


def run_less(args, levels):
    """Scores of the lower rows, (N,) float64, from the first step or where a killed run stopped."""
    groups = ["all"] * len(levels.upper)
    if args.upper_groups:
        if "kind" not in levels.upper.column_names:
            raise UserError("--upper-groups: the upper rows have no column kind; name it with "
                            "--upper-columns kind=...")
        groups = levels.upper["kind"][:]
    folder.seed_everything(args.seed)
    base = models.load_model(args.model, processes.pick_device(args.device), args.dtype,
                              args.four_bit)
    work = open_work(args, base, levels, groups)
    model = models.add_lora(base, args.lora_rank, args.lora_alpha,
                             checkpointing=args.gradient_checkpointing)
    theta = [p for p in model.parameters() if p.requires_grad]
    lower, upper = batches.tokens_only(levels.lower), batches.tokens_only(levels.upper)
    files = warm_up(model, theta, lower, work, fraction=args.warmup_fraction, epochs=args.epochs,
                    batch=args.batch, micro_batch=args.micro_batch, lr=args.lr, seed=args.seed)
    return less_scores(model, theta, lower, upper, groups, files, work, args.micro_batch)
