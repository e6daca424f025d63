"""Checks of the Triton kernel that run compiled (test_cuda.py) and interpreted (test_kernel.py).

As a script: every check on the CPU, one line of JSON; TRITON_INTERPRET=1 must be set before.
"""

import json

import torch

import logprobs
from logprobs import token_logprobs

MODES = ("bfloat16", "float32")
# name: (rows, vocabulary); a block has 8,192 columns
CASES = {"one token": (3, 1), "small": (5, 37), "ragged": (7, 9003), "whole blocks": (4, 16384),
         "one over": (3, 8193), "extreme": (6, 8500), "near one": (8, 8500), "equal": (2, 8200),
         "rising": (4, 17000)}


def make_logits(case):
    """float32 logits (C, V) and targets (C,)."""
    rows, vocabulary = CASES[case]
    generator = torch.Generator().manual_seed(len(case))
    logits = 3 * torch.randn(rows, vocabulary, generator=generator)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    if case == "extreme":  # +-1e4, at the target, elsewhere, everywhere
        logits[0, targets[0]] = 1e4
        logits[1, targets[1]] = -1e4
        logits[2, 0], targets[2] = 1e4, vocabulary - 1
        logits[3] = -1e4
        logits[4] = 1e4 * torch.sign(logits[4])
        logits[5] += 1e4
    if case == "near one":  # the others share 1e-1 to 1e-8: one-hot minus softmax cancels there
        for row in range(rows):
            logits[row] = -30.0
            logits[row, targets[row]] = 0.0
            logits[row, (targets[row] + 1) % vocabulary] = -2.302585 * (row + 1)
    if case == "rising":  # behind the first block, past the kernel's headroom and just within
        logits[0, 16999] = 300.0
        logits[1, 9000] = 39.0
        logits[2, 9000] = 60.0
        targets[2] = 9000
        logits[3] = torch.linspace(-200, 200, vocabulary)
    if case == "equal":
        logits[:] = 0.0
    return logits, targets


def exact(logits, targets):
    """log p and one-hot minus softmax in float64; 1 - p of the target from the others' sum."""
    logps = torch.log_softmax(logits.double(), dim=1)
    gradient = -logps.exp()
    rows = torch.arange(len(targets))
    gradient[rows, targets] = 0.0
    gradient[rows, targets] = -gradient.sum(dim=1)
    return logps[rows, targets], gradient


def relative(found, expected):
    """The largest error of a row over the row's norm; zero where both are zero."""
    error = (found.double().cpu() - expected).norm(dim=1)
    return (error / expected.norm(dim=1).clamp_min(1e-300)).max().item()


def logps_error(found, expected):
    """Absolute below one nat, relative above: float32 holds log p = -1e4 to 1e-3 only."""
    return ((found.double().cpu() - expected).abs() / expected.abs().clamp_min(1)).max().item()


def check_rows(case, mode, device):
    """The kernel on rows whose memory is wider than the vocabulary, as in `_chunked`."""
    logits, targets = make_logits(case)
    expected, gradient = exact(logits, targets)
    rows, vocabulary = logits.shape
    dtype = getattr(torch, mode)
    memory = torch.full((rows, -(-vocabulary // 16) * 16 + 16), 77.0, device=device)
    memory[:, :vocabulary] = logits
    exps = torch.full_like(memory, 77.0, dtype=dtype)
    logps = torch.empty(rows, device=device)
    rest, total = logprobs._triton_rows(memory[:, :vocabulary], targets.to(device), logps,
                                        exps[:, :vocabulary])
    found = -exps[:, :vocabulary].double().cpu()
    found[torch.arange(rows), targets] = rest.double().cpu()
    found /= total.double().cpu()[:, None]
    return {"logps": logps_error(logps, expected), "gradient": relative(found, gradient),
            "padding_untouched": bool((exps[:, vocabulary:] == 77.0).all())}


def problem(dtype, device, length=37, width=24, vocabulary=5003):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(length, width, generator=generator).to(dtype).to(device)
    head = torch.randn(vocabulary, width, generator=generator).to(dtype).to(device)
    return hidden, head, torch.randint(0, vocabulary, (length,), generator=generator).to(device)


def brute_force(hidden, head, targets, weights):
    """Values and gradient by autograd through log_softmax in float64 on the CPU."""
    hidden, head = (x.detach().double().cpu() for x in (hidden, head))
    logps = torch.log_softmax(hidden.requires_grad_() @ head.T, 1)
    logps = logps[torch.arange(len(targets)), targets.cpu()]
    return logps.detach(), *torch.autograd.grad(logps, hidden, weights.double().cpu())


def check_function(dtype, device):
    hidden, head, targets = problem(dtype, device)
    weights = torch.ones(len(targets), device=device)
    wanted = hidden.clone().requires_grad_()
    logps = token_logprobs(wanted, head, targets, kernel="triton")
    logps.backward(weights)
    expected, gradient = brute_force(hidden, head, targets, weights)
    norm = gradient.norm()
    return {"logps": logps_error(logps.detach(), expected),
            "gradient": ((wanted.grad.double().cpu() - gradient).norm() / norm).item()}


def check_no_rows(device):
    hidden, head, targets = problem(torch.bfloat16, device, length=0)
    hidden.requires_grad_()
    logps = token_logprobs(hidden, head, targets, kernel="triton")
    logps.sum().backward()
    return {"logps": list(logps.shape), "gradient": list(hidden.grad.shape)}


def check_no_grad(device):
    logits, targets = make_logits("ragged")
    logps = torch.empty(len(logits), device=device)
    before = logits.to(device)
    kept = before.clone()
    logprobs._triton_rows(before, targets.to(device), logps)
    return {"logps": logps_error(logps, exact(logits, targets)[0]),
            "logits_untouched": torch.equal(before, kept)}


def main():
    report = {f"{case} {mode}": check_rows(case, mode, "cpu") for case in CASES for mode in MODES}
    logprobs.CHUNK_ELEMENTS = 16 * 5003  # three chunks, the last one ragged
    for dtype in (torch.bfloat16, torch.float32):
        report[f"token_logprobs {str(dtype)[6:]}"] = check_function(dtype, "cpu")
    report["no rows"], report["no grad"] = check_no_rows("cpu"), check_no_grad("cpu")
    for name, (hidden, head, targets) in {
            "float64": problem(torch.float64, "cpu"),
            "trained head": problem(torch.float32, "cpu")}.items():
        try:
            token_logprobs(hidden, head.requires_grad_(name == "trained head"), targets,
                           kernel="triton")
        except ValueError as error:
            report[name] = str(error)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
