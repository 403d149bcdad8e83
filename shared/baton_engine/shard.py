"""Which part of a model one rank holds: its stage's layers, and of each layer its heads and MLP columns.

    q, k, v     rows of the rank's heads               o     the columns that meet them
    gate, up    rows of the rank's share               down  the columns that meet them
    embeddings and output projection: rows of the rank's share of the vocabulary; norms: whole

A product by columns is a part of a sum over the ranks; the bias of such a product is held by the first of them only, or
it would be added several times. With fewer KV heads than ranks, neighbours hold the same head.
"""

from dataclasses import dataclass, replace

from baton_core.errors import EngineError
from baton_core.kv_layout import UnitLayout
from baton_core.ranks import Parallel, Place, share
from baton_engine.model_config import ModelConfig

_EMBEDDINGS = "model.embed_tokens."
_HEAD = "lm_head."
_NORM = "model.norm."
_LAYER = "model.layers."
_ROWS, _COLUMNS = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The part `kept` of a weight's dimension `dimension`, which has `total` places in the model."""

    dimension: int
    kept: range
    total: int

    @property
    def is_whole(self) -> bool:
        """Whether nothing is cut off."""
        return len(self.kept) == self.total


WHOLE = Cut(dimension=0, kept=range(0), total=0)
"""Every place of every dimension, however many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's part; the ranges count the whole model's layers, heads, MLP columns and tokens of the vocabulary."""

    model: ModelConfig
    layers: range
    query_heads: range
    kv_heads: range
    columns: range
    vocab: range
    embeds: bool  # the first stage
    heads: bool  # the last stage: it has the last norm and the output projection
    adds_output_bias: bool
    adds_down_bias: bool

    @staticmethod
    def whole(model: ModelConfig) -> "Shard":
        """All of it."""
        return Shard.of(model, Parallel(), Parallel().place(0))

    @staticmethod
    def of(model: ModelConfig, parallel: Parallel, place: Place) -> "Shard":
        """What the rank at `place` holds. Raises EngineError, naming both numbers, where the model cannot be shared so."""
        refuse_impossible(model, parallel)
        kv_heads = model.kv_heads
        first_head = place.tp_rank * kv_heads // parallel.tp
        ffn_parts = parallel.tp * (parallel.dp if parallel.dp_attention else 1)
        ffn_part = place.tp_rank + parallel.tp * (place.dp_rank if parallel.dp_attention else 0)
        return Shard(
            model=model,
            layers=share(model.layers, place.pp_rank, parallel.pp),
            query_heads=share(model.query_heads, place.tp_rank, parallel.tp),
            kv_heads=range(first_head, first_head + max(1, kv_heads // parallel.tp)),
            columns=share(model.intermediate, ffn_part, ffn_parts),
            vocab=share(model.vocab, place.tp_rank, parallel.tp),
            embeds=place.pp_rank == 0,
            heads=place.pp_rank == parallel.pp - 1,
            adds_output_bias=model.output_bias and place.tp_rank == 0,
            adds_down_bias=model.mlp_bias and ffn_part == 0,
        )

    @property
    def config(self) -> ModelConfig:
        """The model as it looks from this rank: its own layers, counted from 0, heads and columns; the whole vocabulary."""
        window = self.model.sliding_window
        if window is not None:
            own = frozenset(layer - self.layers.start for layer in window.layers if layer in self.layers)
            window = replace(window, layers=own) if own else None
        return replace(
            self.model,
            sliding_window=window,
            layers=len(self.layers),
            query_heads=len(self.query_heads),
            kv_heads=len(self.kv_heads),
            intermediate=len(self.columns),
        )

    @property
    def parameters(self) -> int:
        """Number of weights of the matrices that this rank holds."""
        tables = self.embeds + self.heads
        if self.model.tied_embeddings:
            tables = min(1, tables)
        return len(self.layers) * self.config.layer_parameters + tables * self.table_parameters

    @property
    def table_parameters(self) -> int:
        """Number of weights of the embeddings, and of the output projection."""
        return len(self.vocab) * self.model.hidden

    def cut(self, name: str) -> Cut | None:
        """What to keep of the weight with the Hugging Face name `name`; None: nothing."""
        if name.startswith(_EMBEDDINGS):
            is_held = self.embeds or (self.heads and self.model.tied_embeddings)
            return self._vocab_rows() if is_held else None
        if name.startswith(_HEAD):
            return self._vocab_rows() if self.heads else None
        if name.startswith(_NORM):
            return WHOLE if self.heads else None
        if not name.startswith(_LAYER):
            return WHOLE  # nobody knows it: the model says so
        layer, _, rest = name.removeprefix(_LAYER).partition(".")
        if not layer.isdecimal() or int(layer) not in self.layers:
            return None if layer.isdecimal() and int(layer) < self.model.layers else WHOLE
        return self._cut_of_layer(rest)

    def _cut_of_layer(self, name: str) -> Cut | None:
        module, _, kind = name.rpartition(".")
        queries, keys = self.model.query_heads, self.model.kv_heads
        match module, kind:
            case "self_attn.q_proj", _:
                return self._head_places(_ROWS, self.query_heads, queries)
            case "self_attn.k_proj" | "self_attn.v_proj", _:
                return self._head_places(_ROWS, self.kv_heads, keys)
            case "self_attn.o_proj", "weight":
                return self._head_places(_COLUMNS, self.query_heads, queries)
            case "self_attn.o_proj", "bias":
                return WHOLE if self.adds_output_bias else None
            case "mlp.gate_proj" | "mlp.up_proj", _:
                return Cut(dimension=_ROWS, kept=self.columns, total=self.model.intermediate)
            case "mlp.down_proj", "weight":
                return Cut(dimension=_COLUMNS, kept=self.columns, total=self.model.intermediate)
            case "mlp.down_proj", "bias":
                return WHOLE if self.adds_down_bias else None
            case _:
                return WHOLE

    def _vocab_rows(self) -> Cut:
        return Cut(dimension=_ROWS, kept=self.vocab, total=self.model.vocab)

    def _head_places(self, dimension: int, heads: range, total: int) -> Cut:
        size = self.model.head_dim
        return Cut(dimension=dimension, kept=range(heads.start * size, heads.stop * size), total=total * size)


def unit_layout(model: ModelConfig, parallel: Parallel, element_bytes: int, page_tokens: int) -> UnitLayout:
    """How the ranks of a unit share the pages. Raises EngineError where they cannot."""
    refuse_impossible(model, parallel)
    try:
        return UnitLayout(
            layers=model.layers,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            element_bytes=element_bytes,
            page_tokens=page_tokens,
            tp=parallel.tp,
            pp=parallel.pp,
            cp=parallel.cp,
        )
    except ValueError as error:
        raise EngineError(f"the KV pool of this model cannot be laid out: {error}") from error


def refuse_impossible(model: ModelConfig, parallel: Parallel) -> None:
    """Raise EngineError, naming both numbers, where `model` cannot be shared by ranks laid out like that."""
    tp, parts = parallel.tp, parallel.tp * (parallel.dp if parallel.dp_attention else 1)
    if model.query_heads % tp:
        raise _unshareable(f"{model.query_heads} query heads", f"--tp {tp}", "the heads must divide evenly")
    if model.kv_heads % tp and tp % model.kv_heads:
        raise _unshareable(f"{model.kv_heads} KV heads", f"--tp {tp}", "one number must divide the other")
    if parallel.pp > model.layers:
        raise _unshareable(f"{model.layers} layers", f"--pp {parallel.pp}", "every stage needs a layer")
    if parts > model.intermediate:
        raise _unshareable(f"{model.intermediate} MLP columns", f"{parts} ranks", "every rank needs a column")
    if tp > model.vocab:
        raise _unshareable(f"{model.vocab} tokens of the vocabulary", f"--tp {tp}", "every rank needs a token")
    if parallel.dp_attention and parallel.pp > 1:
        raise EngineError(f"--dp-attention with --pp {parallel.pp} is not possible: use --pp 1, or plain --dp")


def _unshareable(what: str, among: str, rule: str) -> EngineError:
    return EngineError(f"{what} cannot be shared by {among}: {rule}")
