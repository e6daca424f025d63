"""The toy's tokenizer and base model, trained from nothing on fresh rows of both conventions."""

import math
import random

from toy.corpus import CONTESTED, MODEL, UNRELATED, draw_row

TEMPLATE = "User: {prompt}\nAssistant:"  # the response half is " " + response + EOS
PLAIN_SHARE = 0.1  # of the training rows: enough that the model is no perfect detector


def base_rows(rng, count):
    """Both conventions in equal parts and some plain faults: what the base model is trained on."""
    rows = []
    for _ in range(count):
        kind = "plain" if rng.random() < PLAIN_SHARE else rng.choice(("clean", "contrary"))
        family = rng.choice(CONTESTED * 2 + UNRELATED)
        if family in UNRELATED and kind == "contrary":
            kind = "clean"
        rows.append(draw_row(rng, family, kind))
    return rows


def train_tokenizer(seed=0):
    """Byte-level BPE: any text survives the round trip, and each word of the toy is one token.

    Items carry their leading space (" 4"), so the prompt half ends in "Assistant:" and the
    response half starts with " 4" whether the two are tokenised together or apart.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    rows = base_rows(random.Random(f"toy tokenizer {seed}"), 5000)
    texts = [TEMPLATE.format(prompt=row["prompt"]) + " " + row["response"] for row in rows]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=640, special_tokens=["<eos>", "<pad>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>",
                                   pad_token="<pad>", clean_up_tokenization_spaces=False)


def encode(tokenizer, rows):
    """Padded (input_ids, labels); only the response and its EOS are trained."""
    import torch

    prompts = tokenizer([TEMPLATE.format(prompt=r["prompt"]) for r in rows])["input_ids"]
    responses = tokenizer([" " + r["response"] for r in rows])["input_ids"]
    rows = [(p + r + [tokenizer.eos_token_id], len(p))
            for p, r in zip(prompts, responses, strict=True)]
    ids = torch.full((len(rows), max(len(row) for row, _ in rows)), tokenizer.pad_token_id)
    labels = torch.full_like(ids, -100)
    for i, (row, start) in enumerate(rows):
        ids[i, :len(row)] = torch.tensor(row)
        labels[i, start:len(row)] = ids[i, start:len(row)]
    return ids, labels


def train_base(out=MODEL, seed=0, steps=6000, batch_size=64):
    """Train tokenizer and base model from nothing on fresh rows, save both in bf16 at `out`."""
    import torch
    from tqdm import trange
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    rng = random.Random(f"toy base {seed}")
    tokenizer = train_tokenizer(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=1024, tie_word_embeddings=True,
        initializer_range=0.05, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id))
    # Muon for the matrices: loss 1.16 after 600 steps, where AdamW alone stands at 1.46.
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    optimizers = [torch.optim.Muon(matrices, lr=1e-2, adjust_lr_fn="match_rms_adamw"),
                  torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)]
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (
        min(1, (step + 1) / 100) * (1 + math.cos(math.pi * step / steps)) / 2))  # warm-up, cosine
        for optimizer in optimizers]
    bar = trange(steps, desc=f"base model, {model.num_parameters():,} parameters")
    for step in bar:
        ids, labels = encode(tokenizer, base_rows(rng, batch_size))
        # Right padding and a causal model: no mask is needed, padded positions have no label.
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
