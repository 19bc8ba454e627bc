"""The built-in model's GGUF as a Hugging Face directory in bfloat16, which is what vLLM loads.

python benchmarks/gguf_to_hf.py MODEL.gguf OUT_DIR        in an environment with torch, gguf, tokenizers, safetensors
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN = 3


def unpermute(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """GGUF interleaves the two halves of rotary heads; undo it. [rows, columns]"""
    halves = weight.reshape(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def convert(source: Path, out: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files."""
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file  # type: ignore[import-not-found,unused-ignore]

    reader = GGUFReader(str(source))

    def field(name: str) -> Any:
        return reader.fields[name].contents() if name in reader.fields else None

    heads = {"attn_q": field("llama.attention.head_count"), "attn_k": field("llama.attention.head_count_kv")}
    tensors = {}
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        name = tensor.name.removesuffix(".weight")
        if name.startswith("blk."):
            _, layer, part = name.split(".")
            if part in heads:
                weight = unpermute(weight, int(heads[part]))
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}"
        else:
            name = TOP_NAMES[name]
        tensors[f"{name}.weight"] = torch.from_numpy(np.ascontiguousarray(weight)).to(torch.bfloat16)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"],
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "max_position_embeddings": field("llama.context_length"),
        "rope_theta": field("llama.rope.freq_base"),
        "rms_norm_eps": float(field("llama.attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(field, out)


def write_tokenizer(field: Any, out: Path) -> None:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE vocabulary that splits digits."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_of_words])
    tokenizer.decoder = decoders.ByteLevel()
    specials = [word for word, kind in zip(words, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in specials])
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": words[field("tokenizer.ggml.bos_token_id")],
        "eos_token": words[field("tokenizer.ggml.eos_token_id")],
        "chat_template": field("tokenizer.chat_template"),
        "model_max_length": field("llama.context_length"),
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
