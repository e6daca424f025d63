"""What the CPU tests show with stand-ins, on a GPU: the compiled kernel, varlen attention, bf16."""

import pytest
import torch
from conftest import make_llama, make_neox
from kernel_checks import (
    CASES,
    MODES,
    check_function,
    check_no_grad,
    check_no_rows,
    check_rows,
)

import generate as generation
import logprobs
import models
from batches import pack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_eq_row_kernel_against_float64(case, mode):
    errors = check_rows(case, mode, "cuda")
    assert errors["logps"] < 1e-5
    assert errors["gradient"] < {"bfloat16": 3e-3, "float32": 2e-6}[mode]
    assert errors["padding_untouched"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_eq_token_logprobs_through_the_kernel(dtype, monkeypatch):
    monkeypatch.setattr(logprobs, "CUDA_CHUNK_BYTES", 4 * 5003 * 128)
    errors = check_function(dtype, "cuda")
    assert errors["logps"] < 1e-5 and errors["gradient"] < 3e-3


def test_no_rows_and_no_gradient():
    assert check_no_rows("cuda") == {"logps": [0], "gradient": [0, 24]}
    assert check_no_grad("cuda")["logps"] < 1e-5


def test_the_kernel_equals_plain_torch_at_a_large_vocabulary():
    """128,256 columns and many rows at once: where a race between warps would show."""
    generator = torch.Generator("cuda").manual_seed(0)
    logits = 4 * torch.randn(512, 128256, generator=generator, device="cuda")
    targets = torch.randint(0, 128256, (512,), generator=generator, device="cuda")
    found, expected = torch.empty(512, device="cuda"), torch.empty(512, device="cuda")
    exps = torch.empty(512, 128256, device="cuda", dtype=torch.bfloat16)
    wanted = logprobs._torch_rows(logits.clone(), targets, expected, True, torch.bfloat16)
    for _ in range(20):
        rest, total = logprobs._triton_rows(logits, targets, found, exps)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        gradient = -exps.float()
        gradient[torch.arange(512), targets] = rest
        torch.testing.assert_close(gradient / total[:, None], wanted.float(), rtol=1e-2, atol=1e-7)


def rows(count=9, longest=60):
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        length = int(torch.randint(4, longest, (1,), generator=generator))
        made.append({"input_ids": torch.randint(4, 290, (length,), generator=generator).tolist(),
                     "trained": [0] * (length // 2) + [1] * (length - length // 2)})
    return made


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("make", [make_llama, make_neox])
def test_a_bf16_step_on_the_gpu_is_the_float64_step(make, checkpointing):
    """Packed log-probs and adapter gradients through varlen attention and the kernel, against
    float64 on the CPU through the loop and plain torch. Head dimension 64, as flash needs."""
    import peft

    found = {}
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        model = make(hidden_size=256, initializer_range=0.05).bfloat16().to(device, dtype)
        model.requires_grad_(False).set_attn_implementation(logprobs.ATTENTION)
        model = peft.get_peft_model(model, peft.LoraConfig(
            r=4, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        generator = torch.Generator().manual_seed(5)
        trained = [p for p in model.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.data = (0.03 * torch.randn(parameter.shape, generator=generator)).to(
                device, torch.float64 if device == "cpu" else torch.float32)
        if checkpointing and device == "cuda":
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        models.speed_up_lora(model)
        logps, lengths = logprobs.sequence_logprobs(model, pack(rows(), device))
        gradients = torch.autograd.grad((-logps / lengths).mean(), trained)
        found[device] = ((logps / lengths).detach().double().cpu(),
                         torch.cat([g.flatten().double().cpu() for g in gradients]))
    assert (found["cuda"][0] - found["cpu"][0]).abs().max() < 0.02
    error = (found["cuda"][1] - found["cpu"][1]).norm() / found["cpu"][1].norm()
    assert error < 0.05, error


def test_generation_on_the_gpu(folders, adapters):
    """Greedy answers with the static cache equal those without, and those of the CPU in float32."""
    written = []
    for device, static in (("cpu", False), ("cuda", False), ("cuda", True)):
        model = models.add_lora(models.load_model(str(folders["llama"]), torch.device(device),
                                                "float32"), adapter=str(adapters["llama"]))
        prompts = [list(range(5, 5 + size)) for size in (3, 9, 17, 30)]
        written.append(generation.generate(
            model, prompts, list("abcd"), max_new_tokens=12, temperature=0.0, end_ids=[0],
            static_cache=static))
    assert written[0] == written[1] == written[2]
