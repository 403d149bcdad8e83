"""Tiny models as people have them: a directory that Transformers saved, with a tokenizer; and drivers to compare with."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from baton_core.plan import SequenceSlice, StepPlan
from baton_engine.loading import Engine, load_engine
from tiny_models import GREEDY, oracle_logits

MARGIN = 5e-3  # of the oracle's best logit over the second: what no rounding of a correct engine can bridge
VOCAB = 320
PAGE_TOKENS = 4
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}<|assistant|>"
CORPUS = (
    "The baker walked through the village and carried a basket of pears under one arm.",
    "Nobody knew why the captain had left two maps at the harbour, but everyone had a theory.",
    "Water expands when it freezes, explained Maria, pointing at the old clock near the museum.",
)


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE of `VOCAB` tokens at most, trained on a few sentences; BOS in front, as Llama 3 has it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    tokenizer.add_tokens([AddedToken("<|user|>", normalized=False)])
    return tokenizer


def save_folder(folder: Path, model: PreTrainedModel, *, shard_bytes: int = 10**9) -> Path:
    """`model` and a tokenizer in `folder`, as `save_pretrained` writes them."""
    model.save_pretrained(folder, max_shard_size=shard_bytes)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(), bos_token="<|begin|>", eos_token="<|end|>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    return folder


def quiet(what: str, done: int, total: int) -> None:
    """Progress nobody watches."""


def load(path: Path, **changed: str | int) -> Engine:
    """An engine for the model at `path`, float32 unless told otherwise."""
    settings: dict[str, str | int] = {"dtype": "float32", "device": "cpu", "kv_tokens": 1_024, "metadata_rows": 2}
    return load_engine(
        model_path=str(path), threads=1, progress=quiet, **(settings | {"page_tokens": PAGE_TOKENS} | changed)
    )


def oracle_answer(model: PreTrainedModel, prompt: list[int], count: int) -> list[int] | None:
    """The greedy answer of `count` tokens; None where the oracle is not sure of every one of them."""
    tokens = list(prompt)
    for _ in range(count):
        best = oracle_logits(model, tokens)[-1].topk(2)
        if best.values[0] - best.values[1] < MARGIN:
            return None
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :]


def answers(engine: Engine, prompts: list[list[int]], count: int, chunk: int) -> list[list[int]]:
    """Greedy answers through the engine, all prompts at once: chunks of some beside the decode steps of others."""
    pages_each = engine.pool.pages // len(prompts)
    tables = [tuple(range(index, engine.pool.pages, len(prompts)))[:pages_each] for index in range(len(prompts))]
    sequences, computed = [list(prompt) for prompt in prompts], [0] * len(prompts)
    while True:
        slices = []
        for index, (sequence, done) in enumerate(zip(sequences, computed, strict=True)):
            if len(sequence) < len(prompts[index]) + count:
                end = min(len(sequence), done + chunk)
                slices.append(
                    SequenceSlice(
                        rid=str(index),
                        tokens=tuple(sequence[done:end]),
                        start=done,
                        pages=tables[index],
                        sample=end == len(sequence),
                        sampling=GREEDY,
                    )
                )
                computed[index] = end
        if not slices:
            return [sequence[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]
        result = engine.runner.run(StepPlan(step=1, slices=tuple(slices)))
        assert result.failed is None, result.failed
        for one in result.results:
            sequences[int(one.rid)].append(one.token)


def sure_prompts(model: PreTrainedModel, lengths: tuple[int, ...], count: int) -> list[tuple[list[int], list[int]]]:
    """A random prompt of each length, with the oracle's answer, of which it is sure."""
    found: list[tuple[list[int], list[int]]] = []
    for length in lengths:
        for seed in range(20):
            random = torch.Generator().manual_seed(100 * length + seed)
            prompt = torch.randint(2, model.config.vocab_size, (length,), generator=random).tolist()
            answer = oracle_answer(model, prompt, count)
            if answer is not None:
                found.append((prompt, answer))
                break
    assert len(found) == len(lengths), "the oracle is never sure"
    return found
