"""Models from a hub name, folder or GGUF file: loading, LoRA and its fast path, FSDP, saving.

Only safetensors and GGUF files are read, and no remote code is run.
"""

import contextlib
import functools
import logging
import math
import os
import shutil
import warnings
from pathlib import Path

import logprobs
from runtime import gguf_files
from runtime.hub import hub_answers
from runtime.precision import pick_dtype
from runtime.processes import sum_gradients, world_size
from utils import UserError, first_line

# ruff: isort: split
import torch

# PEFT imports bitsandbytes, which announces that it lacks a CPU kernel nobody asked for.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated")
warnings.filterwarnings("ignore", message="Could not find a config file in")  # beside a GGUF file


# --- loading --------------------------------------------------------------------------------------

def _is_path(name):
    """Whether a name can be none of the hub's."""
    return os.path.exists(name) or name.startswith((".", "/", "~")) or name.count("/") > 1


def _source(name):
    """What `from_pretrained` takes for a model's name, and its options: a GGUF file is one.

    A local folder is taken as it is; a hub name is looked up, in seconds.
    """
    file = gguf_files.find(name)
    if file is not None:
        gguf_files.check_header(file)
        return str(file.parent), {"gguf_file": file.name}
    if not os.path.isdir(name):  # False for a name that is too long, where Path's own raises
        if _is_path(name):
            raise UserError(f"{name}: no such folder for the model, and no .gguf file")
        hub_answers("model_info", name, "model")
    return name, {}


def _refused(name, what, error):
    """The `UserError` for a model that transformers cannot read."""
    file = gguf_files.find(name)
    return UserError(f"{name}: {what} ({first_line(error)})") if file is None else \
        gguf_files.unreadable(file, error)


def load_tokenizer(name):
    """The tokenizer of a hub name, local folder or GGUF file."""
    from transformers import AutoTokenizer

    source, options = _source(name)
    try:
        return AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:  # broken files raise anything from OSError to AttributeError
        raise _refused(name, "the tokenizer cannot be loaded", error) from None


def load_config(name):
    """The model's configuration alone: sizes are known before any weight is read."""
    from transformers import AutoConfig

    source, options = _source(name)
    try:
        config = AutoConfig.from_pretrained(source, **options)
        sizes = config.get_text_config()
        if not config.is_encoder_decoder:
            without_weights(config)
            if min(sizes.hidden_size, sizes.num_hidden_layers) < 1:
                raise ValueError(f"{sizes.num_hidden_layers} layers of size {sizes.hidden_size}")
    except Exception as error:  # impossible sizes raise anything from TypeError to OverflowError
        raise _refused(name, "the model cannot be loaded", error) from None
    if config.is_encoder_decoder:
        raise UserError(f"{name}: an encoder-decoder model; these scripts train decoders")
    return config


def without_weights(config):
    """The model of a configuration on the meta device: names and shapes, no memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def context_length(config):
    """Tokens of the longest row, within any sliding window; 2**31 where no limit is named."""
    text = config.get_text_config()
    slides = getattr(text, "use_sliding_window", True) and "sliding_attention" in (
        getattr(text, "layer_types", None) or ["sliding_attention"])
    limits = (getattr(text, "max_position_embeddings", None),
              slides and getattr(text, "sliding_window", None))
    return min(limit or 2**31 for limit in limits)


def _read_model(name, device, dtype, four_bit):
    """What transformers makes of a model's files, every tensor of it read; torch's dtype."""
    import transformers

    source, gguf = _source(name)
    options = {"dtype": dtype, "attn_implementation": logprobs.ATTENTION, "use_safetensors": True}
    if gguf and four_bit:
        raise UserError(f"{name}: --four-bit quantises safetensors; a GGUF file is dequantised at "
                        "loading")
    if gguf:
        options |= gguf | {"quantization_config": transformers.GgufConfig(dequantize=True)}
    if four_bit:
        options["quantization_config"] = transformers.BitsAndBytesConfig(load_in_4bit=True,
            bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
        options["device_map"] = {"": device}
    transformers.logging.set_verbosity_error()  # its load report; ours is one line
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            source, output_loading_info=True, **options)
    except Exception as error:  # transformers, safetensors and bitsandbytes raise a dozen classes
        if type(error).__name__ != "SafetensorError":
            raise _refused(name, "the model cannot be loaded", error) from None
        raise UserError(f"{name}: broken weights file ({first_line(error)}); copy it again") \
            from None
    if report["missing_keys"]:  # transformers fills them with random numbers and goes on
        raise UserError(f"{name}: the weights file lacks {len(report['missing_keys'])} of the "
                        f"model's tensors (such as {min(report['missing_keys'])}); copy it again")
    if report["unexpected_keys"]:
        print(f"warning: {name}: {len(report['unexpected_keys'])} tensors of the weights file have "
              f"no place in the model of its config.json ({min(report['unexpected_keys'])}, ...)")
    return model


def load_model(name, device, dtype="auto", four_bit=False, on_host=False):
    """A frozen causal LM with packed attention, dropout off, in evaluation mode.

    dtype: "auto" (see runtime/precision.py) or a name. `four_bit` is an NF4 base through
    bitsandbytes. `on_host` leaves the weights in host memory, for `shard`.
    """
    dtype = pick_dtype(dtype, device, dtype == "auto" and load_config(name), four_bit)
    model = _read_model(name, device, dtype, four_bit)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # log-probs that enter a ratio must be functions of theta alone
        if type(module).__name__ == "Linear4bit":
            # The AVX512 repacking for inference makes later gradients wrong by 97 %.
            module.support_avx512bf16_for_cpu = False
    for key in ("attention_dropout", "attn_pdrop"):
        if getattr(model.config, key, None):
            setattr(model.config, key, 0.0)
    model = (model if four_bit or on_host else model.to(device)).eval().requires_grad_(False)
    try:
        logprobs.check_model(model, tolerance=0.1 if dtype == torch.bfloat16 or four_bit else 1e-3)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"{name}: packed rows do not run through it: {first_line(error)}") from None
    return model


# --- LoRA -----------------------------------------------------------------------------------------

def find_adapter(name):
    """`UserError` unless a folder holds an adapter; a hub name is looked up. Nothing is loaded."""
    if not _is_path(name):
        hub_answers("model_info", name, "adapter")
    elif not os.path.exists(os.path.join(name, "adapter_config.json")):
        raise UserError(f"{name}: no LoRA adapter (no adapter_config.json); a run's is in adapter/")


def add_lora(model, rank=16, alpha=16, adapter=None, checkpointing=False):
    """A PEFT model with LoRA on every linear layer but the head, or the adapter of a folder.

    An adapter of a folder keeps its own rank, alpha and layers; its dropout is switched off. An
    adapter is float32, float64 over a float64 base. Draws from torch's global generator.
    """
    import peft

    if adapter is not None:
        try:
            with warnings.catch_warnings(action="ignore"):  # PEFT's list; ours is one line
                model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True,
                                                       ignore_mismatched_sizes=True)
                # Once more: what matches nothing stays random, and only this call tells.
                found = model.load_adapter(adapter, "default", is_trainable=True,
                                           ignore_mismatched_sizes=True)
        except Exception as error:  # PEFT, safetensors and the hub raise a dozen classes here
            raise UserError(f"{adapter}: not a LoRA adapter for this model ({first_line(error)})") \
                from None
        for names, what in ((found.missing_keys, "lacks, or has in another shape,"),
                            (found.unexpected_keys, "has, and the model has no place for,")):
            if names:
                raise UserError(f"{adapter}: not an adapter of this model: its weights file {what} "
                                f"{names[0]} (one of {len(names)} tensors); give the --model that "
                                "it was trained on, or copy it again")
    else:
        model = peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=alpha,
            lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"))
    config = model.peft_config["default"]
    # What is trained and no LoRA matrix would be in no checkpoint; PiSSA and OLoRA change the base.
    if (config.peft_type != "LORA" or config.use_dora or config.bias != "none"
            or config.lora_alpha <= 0 or config.init_lora_weights not in (True, False, "gaussian")
            or any(p.requires_grad and "lora_" not in name
                   for name, p in model.named_parameters())):
        raise UserError(f"{adapter}: only plain LoRA adapters are trained further (no DoRA, PiSSA, "
                        "OLoRA, bias, trained tokens, modules_to_save, alpha 0); merge it and give "
                        "the result as --model")
    config.lora_dropout = 0.0  # the twin's too: log-probs are functions of theta alone
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    speed_up_lora(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()  # transformers checkpoints in training mode only
    return model


class _LoraLinear(torch.autograd.Function):
    """x W^T + scale (x A^T) B^T without a pass over memory for the adapter.

    PEFT's own forward scales, adds and, in the backward, adds again: passes over T x d that cost
    half of the frozen product on a CPU. Here the adapter's products accumulate into the base's.
    x (..., in), W (out, in) frozen, A (r, in), B (out, r); computes in the dtype of W, so float32
    masters of a bf16 base are rounded when used; gradients have the dtype of A and B.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, a, b, scale):
        flat = x.reshape(-1, x.shape[-1]).to(weight.dtype)
        low = flat @ a.to(weight.dtype).T
        output = torch.nn.functional.linear(flat, weight, bias)
        output.addmm_(low, b.to(weight.dtype).T, alpha=scale)
        ctx.save_for_backward(flat, weight, a, b, low)
        ctx.scale, ctx.input = scale, (x.shape, x.dtype)
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        flat, weight, a, b, low = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        grad_low = (grad @ b.to(weight.dtype)).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight).addmm_(grad_low, a.to(weight.dtype))
            grad_x = grad_x.view(ctx.input[0]).to(ctx.input[1])
        grad_a, grad_b = grad_low.T @ flat, (grad.T @ low).mul_(ctx.scale)
        return grad_x, None, None, grad_a.to(a.dtype), grad_b.to(b.dtype), None


def _lora_forward(layer, x, *args, **kwargs):
    """A PEFT LoRA layer's forward by `_LoraLinear`; PEFT's own where that would not be the same."""
    names, base = layer.active_adapters, layer.base_layer
    if args or kwargs or layer.disable_adapters or layer.merged or len(names) != 1 \
            or names[0] not in layer.lora_A or names[0] in layer.lora_variant \
            or base.weight.requires_grad or layer.lora_B[names[0]].bias is not None \
            or getattr(layer.lora_dropout[names[0]], "p", 0.0):
        return type(layer).forward(layer, x, *args, **kwargs)
    return _LoraLinear.apply(x, base.weight, base.bias, layer.lora_A[names[0]].weight,
                             layer.lora_B[names[0]].weight, layer.scaling[names[0]])


def _autocast_forward(layer, dtype, x, *args, **kwargs):
    """PEFT's own forward of a quantised layer with its products in `dtype`, that of the base."""
    with torch.autocast(x.device.type, dtype=dtype):
        return type(layer).forward(layer, x, *args, **kwargs)


def speed_up_lora(model):
    """LoRA layers compute in the dtype of the frozen base from now on, in place.

    PEFT keeps adapters in float32 and would upcast what they read: two matrix products in three
    ran in float32. Layers over frozen linear ones compute by `_LoraLinear`; others (quantised, say)
    by PEFT's own forward, under autocast when the base is bf16 or fp16.
    """
    dtype = model.get_input_embeddings().weight.dtype
    for layer in (m for m in model.modules() if "lora_A" in m._modules):  # hasattr is slow
        if type(getattr(layer, "base_layer", None)) is torch.nn.Linear:
            layer.forward = functools.partial(_lora_forward, layer)
        elif dtype in (torch.bfloat16, torch.float16):
            layer.cast_input_dtype_enabled = False  # PEFT would widen what autocast rounds
            layer.forward = functools.partial(_autocast_forward, layer, dtype)


def add_twin(model, name):
    """A second LoRA adapter on the same base, equal to the first; returns its parameters.

    The first stays active; `adapter` switches for a while.
    """
    model.add_adapter(name, model.peft_config["default"])
    twin = {key: p for key, p in model.named_parameters() if f".{name}." in key}
    with torch.no_grad():
        for key, parameter in twin.items():
            parameter.copy_(model.get_parameter(key.replace(f".{name}.", ".default.")))
    model.set_adapter("default")
    return list(twin.values())


@contextlib.contextmanager
def adapter(model, name):
    """Work with another adapter of the model, then with the first again."""
    model.set_adapter(name)
    try:
        yield
    finally:
        model.set_adapter("default")


def bare(model):
    """The causal LM inside a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


# --- the optimiser's step -------------------------------------------------------------------------

def update(parameters, optimizer, clip):
    """One step of the optimiser on gradients summed over all processes; their norm before clipping.

    A gradient that is not finite is not applied; the caller sees it by the norm.
    """
    sum_gradients(parameters)
    norm = torch.nn.utils.clip_grad_norm_(parameters, clip)
    if torch.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    return norm


def set_learning_rate(optimizers, lr, schedule, step, total):
    """beta_k into every optimiser: constant, or a cosine from `lr` to zero; returns it."""
    if schedule == "cosine":
        lr *= 0.5 * (1 + math.cos(math.pi * step / total))
    for group in (group for own in optimizers.values() for group in own.param_groups):
        group["lr"] = lr
    return lr


# --- several GPUs, saving -------------------------------------------------------------------------

def shard(model, device):
    """Split the frozen weights of the decoder layers over all processes (FSDP2), in place.

    model: a PEFT model loaded with `on_host`, every adapter already there. Each layer is gathered
    when a forward or backward reaches it and given up again. Adapters, embeddings, head and norms
    outside the layers stay whole on every process: adapters are reduced by `sum_gradients` as
    always, and log-probs read the head's weight.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh(device.type, (world_size(),))
    backbone = bare(model).base_model
    layers = next(m for m in backbone.modules() if isinstance(m, torch.nn.ModuleList))
    for layer in layers:
        adapters = {p for name, p in layer.named_parameters() if "lora_" in name}
        fully_shard(layer, mesh=mesh, ignored_params=adapters)
    # The root has no weights of its own: it only lets one layer be fetched while another works.
    whole = {p for p in model.parameters() if not isinstance(p, DTensor)}
    fully_shard(backbone, mesh=mesh, ignored_params=whole)
    for tensor in (*whole, *model.buffers()):
        tensor.data = tensor.data.to(device)
    bare(model)._is_fsdp_managed_module = True  # transformers' generate keeps processes in step


def is_sharded(model):
    """Whether `shard` has split the base over the processes."""
    return getattr(bare(model), "_is_fsdp_managed_module", False)


def save_adapter(model, folder):
    """PEFT adapter in PEFT's own files, in place at once or not at all."""
    config = model.peft_config["default"]
    if isinstance(config.target_modules, set):  # saved in the order of the set: another every time
        config.target_modules = sorted(config.target_modules)
    save_pretrained(model, folder, selected_adapters=["default"])


def save_pretrained(model, folder, tokenizer=None, **options):
    """`model.save_pretrained`, and the tokenizer's, in place at once or not at all."""
    partial = Path(folder).with_name(f".{Path(folder).name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(partial, **options)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        for file in partial.glob("*.safetensors"):  # written for their owner alone
            file.chmod(next(partial.glob("*.json")).stat().st_mode)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        # safetensors' and tokenizers' words for a full disk
        if type(error).__name__ != "SafetensorError" and type(error) is not Exception:
            raise
        raise UserError(f"{folder}: cannot be written ({first_line(error)}); free space, then "
                        "continue with --resume") from None
