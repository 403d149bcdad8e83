"""Makes `sentencepiece.json`: a small vocabulary, and what sentencepiece itself makes of some texts with it.

Needs `pip install sentencepiece`, which nothing else here does.
"""

import io
import json
from pathlib import Path

import sentencepiece

HERE = Path(__file__).parent
VOCAB = 420
TEXTS = (
    "Hello, world!",
    "The prefill worker computes a prompt and hands its KV cache to a decode worker.",
    "  leading and   inner  and trailing  ",
    "line\n\n  indented\ttabbed",
    "1234567890 and 3.14",
    "naïve café “quotes”",
    "日本語 🎉",
    "a",
    " ",
    "",
)


def main() -> None:
    """Train, encode, write."""
    lines = [
        line for path in ("ARCHITECTURE.md", "README.md") for line in (HERE.parents[1] / path).read_text().split("\n")
    ]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in lines if line.strip()]),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        character_coverage=0.999,
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(pieces.get_piece_size())
    kinds = [
        2 if pieces.is_unknown(id_) else 3 if pieces.is_control(id_) else 6 if pieces.is_byte(id_) else 1 for id_ in ids
    ]
    made = {
        "version": sentencepiece.__version__,
        "tokens": [pieces.id_to_piece(id_) for id_ in ids],
        "scores": [pieces.get_score(id_) for id_ in ids],
        "kinds": kinds,
        "texts": [{"text": text, "ids": pieces.encode(text)} for text in TEXTS],
    }
    (HERE / "sentencepiece.json").write_text(json.dumps(made, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
