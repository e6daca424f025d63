"""What the CPU tests show with stand-ins, on a GPU: the compiled kernel, varlen attention, bf16."""

import peft
import pytest
import torch
from conftest import make_llama, make_neox
from kernel_checks import CASES, assert_exact, check_function, check_rows
from test_logprobs import ragged_rows

import generate as generation
import logprobs
import models
from logprobs import pack, sequence_logprobs, token_logprobs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
LIMITS = {"bfloat16": 3e-3, "float32": 2e-6}
BORDERS = [(length, length - length // 2) for length in (4, 59, 31, 17, 8, 42, 5, 23, 50)]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("case", CASES)
def test_eq_row_kernel_against_float64(case, dtype):
    assert_exact(check_rows(case, dtype, "cuda"), LIMITS[dtype])


@pytest.mark.parametrize("dtype", LIMITS)
def test_eq_token_logprobs_through_the_kernel(dtype):
    errors = check_function(dtype, "cuda")
    assert errors["logps"] < 1e-5
    assert errors["gradient"] < 3e-3
    assert errors["without gradient"] < 1e-6  # another kernel, which adds in another order
    assert errors["rows of none"] == 0


def test_the_kernel_equals_plain_torch_at_a_large_vocabulary(monkeypatch):
    """128,256 columns, and many rows in chunks that end ragged: where a race between warps would
    show."""
    monkeypatch.setattr(logprobs, "CUDA_CHUNK_ELEMENTS", 384 * 128256)
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(1000, 64, generator=generator, device="cuda").bfloat16()
    head = torch.randn(128256, 64, generator=generator, device="cuda").bfloat16()
    targets = torch.randint(0, 128256, (1000,), generator=generator, device="cuda")
    hidden.requires_grad_()
    expected = token_logprobs(hidden, head, targets, kernel="torch")
    (wanted,) = torch.autograd.grad(expected.sum(), hidden)
    for _ in range(20):
        logps = token_logprobs(hidden, head, targets, kernel="triton")
        (gradient,) = torch.autograd.grad(logps.sum(), hidden)
        torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)
        errors = (gradient - wanted).float().norm(dim=1)
        assert (errors < 2e-2 * wanted.float().norm(dim=1)).all()


@pytest.mark.parametrize("way", ["plain", "checkpointing", "compiled"])
@pytest.mark.parametrize("make", [make_llama, make_neox])
def test_a_bf16_step_on_the_gpu_is_the_float64_step(make, way):
    """Packed log-probs and adapter gradients through varlen attention and the kernel, against
    float64 on the CPU through the loop and plain torch. Head dimension 64, as flash needs."""

    def step(device, dtype):
        model = make(hidden_size=256, initializer_range=0.05).bfloat16().to(device, dtype)
        model.requires_grad_(False).set_attn_implementation(logprobs.ATTENTION)
        config = peft.LoraConfig(
            r=4,
            lora_alpha=4,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        model = peft.get_peft_model(model, config)
        generator = torch.Generator().manual_seed(5)
        trained = [p for p in model.parameters() if p.requires_grad]
        adapter_dtype = torch.promote_types(dtype, torch.float32)
        for parameter in trained:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = (0.03 * noise).to(device, adapter_dtype)
        if way == "checkpointing":
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        models.speed_up_lora(model)
        if way == "compiled" and device == "cuda":
            models.compile_layers(model)
        logps, lengths = sequence_logprobs(
            model, pack(ragged_rows(borders=BORDERS), device)
        )
        losses = -logps / lengths
        gradients = torch.autograd.grad(losses.mean(), trained)
        flat = torch.nn.utils.parameters_to_vector(gradients)
        return losses.detach().double().cpu(), flat.double().cpu()

    losses, gradient = step("cuda", torch.bfloat16)
    expected, wanted = step("cpu", torch.float64)
    assert (losses - expected).abs().max() < 0.02
    assert (gradient - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("static", [False, True])
def test_generation_on_the_gpu(folders, adapters, static):
    """Greedy answers equal those of the CPU in float32; a cache of fixed size is compiled."""
    prompts = [list(range(5, 5 + size)) for size in (3, 9, 17, 30)]
    written = []
    for device in ("cpu", "cuda"):
        model = models.load_model(str(folders["llama"]), torch.device(device), "float32")
        model = models.add_lora(model, adapter=str(adapters["llama"]))
        answers = generation.generate(
            model,
            prompts,
            list("abcd"),
            max_new_tokens=12,
            temperature=0.0,
            end_ids=[0],
            static_cache=static,
        )
        written.append(answers)
    assert written[0] == written[1]
