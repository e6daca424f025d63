"""Models and rows to measure with: published shapes with random weights, files, or the toy."""

import math
import random
import tempfile

import torch

import batches
import logprobs
import models
from data import tokens
from runtime.precision import pick_dtype
from toy import corpus
from utils import UserError

SHAPES = {  # architectures by name, with random weights
    "pythia-1b": ("gpt_neox", {
        "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 8, "max_position_embeddings": 2048}),
    "llama3-8b": ("llama", {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 8192}),
    "tiny": ("llama", {
        "vocab_size": 640, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048}),
    "tiny-neox": ("gpt_neox", {
        "vocab_size": 640, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 2048}),
}


def shape_config(name):
    """The configuration of transformers for one of SHAPES."""
    from transformers import AutoConfig

    kind, options = SHAPES[name]
    return AutoConfig.for_model(kind, **options)


def shaped_model(config, device, dtype):
    """A causal LM with random weights and packed attention, made on the device."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype,
                                                 attn_implementation=logprobs.ATTENTION)
    return model.eval().requires_grad_(False)


def to_four_bit(model):
    """Every linear layer but the head becomes bitsandbytes' NF4 with double quantisation, in place.

    What `models.load_model` does with a file's weights, for weights that are in no file.
    """
    import bitsandbytes

    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is not torch.nn.Linear or layer is head:
                continue
            small = bitsandbytes.nn.Linear4bit(
                layer.in_features, layer.out_features, bias=layer.bias is not None,
                compute_dtype=layer.weight.dtype, quant_type="nf4", device="meta")
            small.weight = bitsandbytes.nn.Params4bit(
                layer.weight.data, requires_grad=False, quant_type="nf4", module=small)
            small.bias = layer.bias
            # The AVX512 repacking for inference makes later gradients wrong by 97 %.
            small.support_avx512bf16_for_cpu = False
            setattr(parent, name, small.to(layer.weight.device))
    model.is_loaded_in_4bit = True  # PEFT asks for it before it believes the layers
    return model


def random_rows(count, mean, vocabulary, seed):
    """Rows of log-normal length (sigma 0.6, 16 to 2,048 tokens), the second half a response."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        length = min(2048, max(16, round(mean * rng.lognormvariate(-0.18, 0.6))))
        rows.append({"input_ids": [rng.randrange(vocabulary) for _ in range(length)],
                     "trained": [0] * (length // 2) + [1] * (length - length // 2)})
    return rows


def load_shape(name, device, count, lower_tokens, upper_tokens, checkpointing=False,
               four_bit=False, dtype="auto"):
    """(model of one of SHAPES with LoRA, lower rows, upper rows), random, `count` rows a level.

    lower_tokens, upper_tokens: mean lengths. dtype: as in `models.load_model`.
    """
    config = shape_config(name)
    lower, upper = (random_rows(count, mean, config.vocab_size, seed)
                    for seed, mean in enumerate((lower_tokens, upper_tokens)))
    base = shaped_model(config, device, pick_dtype(dtype, device, config))
    if four_bit:
        base = to_four_bit(base)
    return models.add_lora(base, checkpointing=checkpointing), lower, upper


def load_files(args, device, count, dtype):
    """The same from --lower, --upper and --model; none of them: the toy.

    --vocabulary: random weights of the model's shape with so many tokens in the head.
    """
    source, vocabulary = args.model or str(corpus.MODEL), args.vocabulary
    lower, upper = args.lower, args.upper
    tokenizer, config = models.load_tokenizer(source), models.load_config(source)
    with tempfile.TemporaryDirectory() as folder:
        if lower is None:
            made = corpus.write(folder)
            lower, upper = made["lower"], made["upper"]
        length = min(getattr(args, "max_length", 2048), config.max_position_embeddings)
        levels = [[dict(row) for row in batches.tokens_only(tokens.load_rows(
            str(file), tokenizer, name=name, limit=count, max_length=length, cache_dir=folder)[0])]
            for name, file in (("lower", lower), ("upper", upper))]
    if vocabulary:
        if vocabulary < config.vocab_size:
            raise UserError(f"--vocabulary {vocabulary}: the tokenizer writes tokens up to "
                            f"{config.vocab_size}")
        config.vocab_size = vocabulary
        base = shaped_model(config, device, pick_dtype(dtype, device, config))
    else:
        base = models.load_model(source, device, dtype)
    lower, upper = ((rows * math.ceil(count / len(rows)))[:count] for rows in levels)
    return models.add_lora(base, checkpointing=args.gradient_checkpointing), lower, upper


def load(args, device, count):
    """(model with LoRA, lower rows, upper rows) of a benchmark's command line."""
    dtype = getattr(args, "dtype", "auto")
    if args.model in SHAPES:
        if given := [name for name in ("lower", "upper", "vocabulary")
                     if getattr(args, name, None) is not None]:
            raise UserError(f"--{given[0]}: {args.model} has random weights and rows and reads no "
                            "other; name a model's folder")
        return load_shape(args.model, device, count, args.lower_tokens, args.upper_tokens,
                          args.gradient_checkpointing, dtype=dtype)
    if len({args.lower is None, args.upper is None, args.model is None}) > 1:
        raise UserError("--lower, --upper and --model belong together; or give --model one of "
                        + ", ".join(SHAPES) + ", or none of them for the embedded toy")
    return load_files(args, device, count, dtype)
