"""A tiny GGUF file for tests, written with the gguf package from one of conftest's Llamas."""

import json

import gguf
import numpy as np
from conftest import CHATML, make_llama, make_tokenizer
from gguf import GGMLQuantizationType as Types

NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm"}
SIZES = {"hidden_size": 32, "intermediate_size": 64}  # whole blocks of 32


def gguf_name(name):
    """blk.0.attn_q.weight for model.layers.0.self_attn.q_proj.weight."""
    name = name.removeprefix("model.").removesuffix(".weight")
    if name.startswith("layers."):
        _, layer, rest = name.split(".", 2)
        return f"blk.{layer}.{NAMES[rest]}.weight"
    return {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[name] \
        + ".weight"


def interleaved(weight, heads):
    """Rows of a query or key projection in llama.cpp's order of rotary pairs."""
    out, width = weight.shape
    return weight.reshape(heads, 2, out // heads // 2, width).swapaxes(1, 2).reshape(out, width)


def add_tokenizer(writer, tokenizer):
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    special = set(tokenizer.all_special_tokens) | {"<|im_start|>", "<|im_end|>"}
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if token in special else 1 for token, _ in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def write_gguf(path, quantised=Types.F32, chat=CHATML, architecture="llama", leave_out=(),
               more=None, **changes):
    """The file, and the model and tokenizer it was made from. `more(writer)` adds what it likes."""
    model, tokenizer = make_llama(**SIZES | changes), make_tokenizer(chat)
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    add_tokenizer(writer, tokenizer)
    if more:
        more(writer)
    for name, tensor in model.state_dict().items():
        if name in leave_out:
            continue
        weight = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            weight = interleaved(weight, config.num_attention_heads if "q_proj" in name
                                 else config.num_key_value_heads)
        kind = quantised if weight.ndim == 2 else Types.F32
        data = np.ascontiguousarray(weight, dtype=np.float32)
        if kind != Types.F32:
            data = gguf.quantize(data, kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, model, tokenizer
