"""The names that llama.cpp gives to a decoder's tensors, and their Hugging Face names."""

import re

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hugging_face_name(name: str) -> str:
    """The Hugging Face name of a known tensor."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    block = _BLOCK.fullmatch(name)
    assert block is not None, name  # unknown names were refused with the config
    return f"model.layers.{block[1]}.{_BLOCK_NAMES[block[2]]}.{block[3]}"


def is_known(name: str) -> bool:
    """Whether the decoder has a place for this tensor."""
    block = _BLOCK.fullmatch(name)
    return name in _TOP_NAMES or (block is not None and block[2] in _BLOCK_NAMES)


def kind_of(name: str) -> str:
    """The name without its layer: what a refusal shows, once instead of once a layer."""
    block = _BLOCK.fullmatch(name)
    return name if block is None else block[2]
