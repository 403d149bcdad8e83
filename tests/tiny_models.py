"""Tiny random decoders for engine tests: exact oracles that need no file, and a small scheduler to drive them."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from baton_core.plan import SequenceSlice, StepPlan
from baton_core.request import Sampling
from baton_engine.attention import layer_views
from baton_engine.kv_pool import KVPool, PoolShape
from baton_engine.llama import LlamaModel
from baton_engine.model_config import ModelConfig, SlidingWindow
from baton_engine.step_batch import BatchBuilder

PAGE_TOKENS = 4
GREEDY = Sampling(temperature=0)
TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 2.0**-17,  # exact in float32, which is what a GGUF file stores
}


def oracle(kind: str = "llama", *, tied: bool = False, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny random Transformers model of an architecture of the Llama family, float32; `changes` of its config."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **({**TINY, "tie_word_embeddings": tied} | changes))
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            # Biases and norms start as constants and every logit starts small: neither would catch a mistake.
            weight.copy_(torch.randn_like(weight) * (0.3 if weight.dim() > 1 else 0.2) + (weight.dim() == 1))
    return model


def config_of(model: PreTrainedModel) -> ModelConfig:
    """Our config of a model made by `oracle`."""
    settings = model.config
    theta = getattr(settings, "rope_theta", None) or settings.rope_parameters["rope_theta"]
    return ModelConfig(
        architecture=settings.model_type,
        layers=settings.num_hidden_layers,
        hidden=settings.hidden_size,
        intermediate=settings.intermediate_size,
        query_heads=settings.num_attention_heads,
        kv_heads=settings.num_key_value_heads,
        head_dim=TINY["head_dim"],
        vocab=settings.vocab_size,
        context_tokens=settings.max_position_embeddings,
        rope_theta=theta,
        norm_eps=settings.rms_norm_eps,
        tied_embeddings=settings.tie_word_embeddings,
        qkv_bias=settings.model_type == "qwen2",
        qk_norm=settings.model_type == "qwen3",
    )


class TinyEngine:
    """Our decoder with an oracle's weights, and a pool."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        window: int | None = None,
    ) -> None:
        self.config = config_of(model)
        if window is not None:
            every = frozenset(range(self.config.layers))
            self.config = replace(self.config, sliding_window=SlidingWindow(tokens=window, layers=every))
        state = {name: weight.detach().clone().to(dtype) for name, weight in model.state_dict().items()}
        if self.config.tied_embeddings:
            state.pop("lm_head.weight", None)
        shape = PoolShape(
            pages=256,
            layers=self.config.layers,
            kv_heads=self.config.kv_heads,
            page_tokens=PAGE_TOKENS,
            head_dim=self.config.head_dim,
            dtype=dtype,
        )
        self.model = LlamaModel(self.config, state, torch.device(device))
        self.pool = KVPool(shape, device)
        self._builder = BatchBuilder(self.config, shape, torch.device(device))
        self._views = layer_views(self.pool)

    @torch.inference_mode()
    def logits(self, *slices: SequenceSlice) -> Tensor:
        """Logits `[sampled slices, vocab]` of one step."""
        batch = self._builder.build(StepPlan(step=1, slices=slices))
        return self.model.logits(self.model.forward(batch, self._views)[batch.sampled_rows]).cpu()


def part(rid: str, tokens: list[int], start: int, first_page: int, *, sample: bool = True) -> SequenceSlice:
    """A slice of a sequence whose 32 pages are scattered over the pool: every 7th page from `first_page` on."""
    pages = tuple((first_page + 7 * index) % 256 for index in range(32))
    return SequenceSlice(
        rid=rid, tokens=tuple(tokens), start=start, pages=pages, sample=sample, sampling=GREEDY, output_index=0
    )


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids."""
    return torch.randint(0, TINY["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def oracle_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """The oracle's logits `[tokens, vocab]`."""
    logits: Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
    return logits
