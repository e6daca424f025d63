"""Models and rows to measure with: published shapes with random weights, files, or the toy."""

import math
import random
import tempfile
from dataclasses import dataclass

import torch

import batches
import logprobs
import models
from data import tokens
from runtime.processes import pick_device
from toy import corpus
from utils import UserError

SHAPES = {  # architectures by name, with random weights
    "pythia-1b": (
        "gpt_neox",
        {
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 8,
        },
    ),
    "llama3-8b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
        },
    ),
    "tiny": (
        "llama",
        {
            "vocab_size": 640,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
    ),
}


@dataclass(frozen=True)
class Work:
    """How much of a shape is measured; the defaults are the paper's, and rows like Alpaca's."""

    batch: int = 32  # rows of each level a step
    micro_batch: int = 8  # rows of each level a forward
    lower_tokens: int = 160  # mean length of a noisy row
    upper_tokens: int = 400  # mean length of a trusted row
    answers: int = 256  # at a time
    new_tokens: int = 512  # an answer


TINY_WORK = Work(
    batch=2, micro_batch=2, lower_tokens=16, upper_tokens=20, answers=2, new_tokens=2
)


def work_of(shape):
    """The `Work` of one of SHAPES: the tiny one only shows that everything runs."""
    return TINY_WORK if shape == "tiny" else Work()


def shape_config(name):
    """The configuration of transformers for one of SHAPES."""
    from transformers import AutoConfig

    kind, options = SHAPES[name]
    return AutoConfig.for_model(kind, **options)


def shaped_model(config, device):
    """A causal LM with random weights and packed attention, made on the device."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=models.pick_dtype("auto", device, config),
            attn_implementation=logprobs.ATTENTION,
        )
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
                layer.in_features,
                layer.out_features,
                bias=layer.bias is not None,
                compute_dtype=layer.weight.dtype,
                quant_type="nf4",
                device="meta",
            )
            small.weight = bitsandbytes.nn.Params4bit(
                layer.weight.data, requires_grad=False, quant_type="nf4", module=small
            )
            small.bias = layer.bias
            # The AVX512 repacking for inference makes later gradients wrong by 97 %.
            small.support_avx512bf16_for_cpu = False
            setattr(parent, name, small.to(layer.weight.device))
    model.is_loaded_in_4bit = True  # PEFT asks for it before it believes the layers
    return model


def random_rows(count, mean, vocabulary, seed):
    """Rows of log-normal length (sigma 0.6, 16 to 2,048 tokens), the second half a response."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        length = round(mean * rng.lognormvariate(-0.18, 0.6))
        length = min(2048, max(16, length))
        prompt = length // 2
        rows.append(
            {
                "input_ids": [rng.randrange(vocabulary) for _ in range(length)],
                "trained": [0] * prompt + [1] * (length - prompt),
            }
        )
    return rows


def load_shape(name, count, checkpointing=False, four_bit=False):
    """(model of one of SHAPES with LoRA, lower rows, upper rows), random, `count` rows a level."""
    config, work = shape_config(name), work_of(name)
    lower = random_rows(count, work.lower_tokens, config.vocab_size, seed=0)
    upper = random_rows(count, work.upper_tokens, config.vocab_size, seed=1)
    base = shaped_model(config, pick_device())
    if four_bit:
        base = to_four_bit(base)
    return models.add_lora(base, checkpointing=checkpointing), lower, upper


def load_files(args, count):
    """The same from --lower, --upper and --model; none of them: the toy.

    --vocabulary: random weights of the model's shape with so many tokens in the head.
    """
    device = pick_device()
    source = args.model or str(corpus.MODEL)
    tokenizer, config = models.load_tokenizer(source), models.load_config(source)
    levels = []
    with tempfile.TemporaryDirectory() as folder:
        files = {"lower": args.lower, "upper": args.upper}
        if args.lower is None:
            files = corpus.write(folder)
        for name in ("lower", "upper"):
            rows, _ = tokens.load_rows(
                str(files[name]),
                tokenizer,
                name=name,
                limit=count,
                max_length=min(2048, config.max_position_embeddings),
                cache_dir=folder,
            )
            rows = [dict(row) for row in batches.tokens_only(rows)]
            copies = math.ceil(count / len(rows))
            levels.append((rows * copies)[:count])
    if args.vocabulary:
        config.vocab_size = args.vocabulary
        base = shaped_model(config, device)
    else:
        base = models.load_model(source, device)
    return models.add_lora(base, checkpointing=args.gradient_checkpointing), *levels


def load(args, count):
    """(model with LoRA, lower rows, upper rows) of a benchmark's command line."""
    if args.model in SHAPES:
        if args.lower or args.upper or args.vocabulary:
            raise UserError(
                f"--model {args.model} has random weights and rows and reads no other; "
                "name a model's folder"
            )
        return load_shape(args.model, count, args.gradient_checkpointing)
    if len({args.lower is None, args.upper is None, args.model is None}) > 1:
        raise UserError(
            "--lower, --upper and --model belong together; or give --model one of "
            + ", ".join(SHAPES)
            + ", or none of them for the embedded toy"
        )
    return load_files(args, count)
