"""Tokenizers of every kind there is: GGUF files of each sort, and Hugging Face directories as people save them."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("gguf")

from gguf import GGUFWriter
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from baton_core.errors import EngineError
from baton_worker.detokenizer import StreamDecoder
from baton_worker.tokenizer import Tokenizer as OurTokenizer

GOLD = json.loads((Path(__file__).parents[1] / "gold" / "sentencepiece.json").read_text())
TEXTS = (
    "The baker walked through the village, didn't she?",
    "I'LL pay 1234567 or 3.14\n\n  indented\ttabbed   spaces   ",
    "naïve café — “quotes” … 日本語 🎉",
    "e\u0301 is é once composed",
    "",
)
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(pre: Any, **options: Any) -> Tokenizer:
    """Byte-level BPE trained on the texts, words cut by `pre`."""
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text * 2 for text in TEXTS], trainer)
    return tokenizer


def write_byte_level(path: Path, tokenizer: Tokenizer, pre: str, **flags: bool) -> Path:
    """The vocabulary of `tokenizer` in a GGUF file without a model."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(tokens.index("<|begin|>"))
    writer.add_eos_token_id(tokens.index("<|end|>"))
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    return written(path, writer)


def written(path: Path, writer: GGUFWriter) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def split(words: str) -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(words), behavior="isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )


# -- GGUF


def test_llama_3s_byte_level_bpe_cuts_digits_by_three_and_prefers_whole_words(tmp_path: Path) -> None:
    theirs = byte_level(split(LLAMA3_WORDS), ignore_merges=True)
    ours = OurTokenizer.from_gguf(write_byte_level(tmp_path / "vocab.gguf", theirs, "llama-bpe"))
    for text in TEXTS:
        assert ours.encode(text, add_special=False) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("x")[0] == theirs.token_to_id("<|begin|>"), "BOS is put in front unless the file says no"
    silent = write_byte_level(tmp_path / "silent.gguf", theirs, "llama-bpe", add_bos_token=False)
    assert OurTokenizer.from_gguf(silent).encode("x") == theirs.encode("x").ids


def test_qwens_byte_level_bpe_is_that_of_transformers(tmp_path: Path) -> None:
    trained = byte_level(split(LLAMA3_WORDS.replace("{1,3}", "")))
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    theirs = Qwen2Tokenizer(vocab=model["vocab"], merges=merges, unk_token=None, eos_token="<|end|>", pad_token=None)
    ours = OurTokenizer.from_gguf(write_byte_level(tmp_path / "vocab.gguf", trained, "qwen2"))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)


def test_sentencepieces_bpe_gives_the_pieces_of_sentencepiece(tmp_path: Path) -> None:
    ours = OurTokenizer.from_gguf(write_sentencepiece(tmp_path / "vocab.gguf"))
    for case in GOLD["texts"]:
        assert ours.encode(case["text"], add_special=False) == case["ids"], case["text"]
        text = ours.decode(case["ids"])
        assert text == (f" {case['text']}" if case["text"] else ""), "the first word's space is kept: an answer goes on"
    assert ours.encode("a")[0] == 1 and ours.eos_ids == (2,) and ours.special_ids == {0, 1, 2}


def test_bytes_that_sentencepiece_spells_out_become_whole_characters_in_a_stream(tmp_path: Path) -> None:
    ours = OurTokenizer.from_gguf(write_sentencepiece(tmp_path / "vocab.gguf"))
    decoder = StreamDecoder(ours)
    pieces = [decoder.feed(token) for token in ours.encode("🎉!", add_special=False)]
    assert "".join(pieces) + decoder.flush() == " 🎉!"
    assert not any("\ufffd" in piece for piece in pieces)


def write_sentencepiece(path: Path) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(GOLD["tokens"])
    writer.add_token_scores(GOLD["scores"])
    writer.add_token_types(GOLD["kinds"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    return written(path, writer)


def test_a_gguf_vocabulary_that_we_cannot_read_is_refused_by_name(tmp_path: Path) -> None:
    trained = byte_level(pre_tokenizers.ByteLevel(False))
    with pytest.raises(EngineError, match=r"vocab\.gguf: tokenizer kind 'tekken' .*known: llama-bpe"):
        OurTokenizer.from_gguf(write_byte_level(tmp_path / "vocab.gguf", trained, "tekken"))
    writer = GGUFWriter(tmp_path / "t5.gguf", "llama")
    writer.add_tokenizer_model("t5")
    with pytest.raises(EngineError, match="tokenizer model 't5' is not supported"):
        OurTokenizer.from_gguf(written(tmp_path / "t5.gguf", writer))
    writer = GGUFWriter(tmp_path / "empty.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    with pytest.raises(EngineError, match="the vocabulary is incomplete: tokens are missing"):
        OurTokenizer.from_gguf(written(tmp_path / "empty.gguf", writer))


# -- Hugging Face directories


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved byte-level tokenizer, and the smallest config.json."""
    backend = byte_level(pre_tokenizers.ByteLevel(False))
    saved = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|end|>")
    saved.chat_template = "{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    saved.save_pretrained(tmp_path)
    write(tmp_path / "config.json", vocab_size=400, eos_token_id=7)
    return tmp_path


def write(path: Path, **values: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({key: value for key, value in (known | values).items() if value is not None}))


def test_a_saved_tokenizer_encodes_decodes_and_renders_as_transformers_does(folder: Path) -> None:
    ours, theirs = OurTokenizer.of_model(folder), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "Hi <|end|>"}]
    for text in (*TEXTS, "a<|end|>b"):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids)
    assert ours.render_chat(chat) == theirs.apply_chat_template(chat, tokenize=False) == "<|begin|>[Hi <|end|>]"
    assert ours.vocab_size == len(theirs)


def test_sentencepiece_tokenizers_of_both_ages_are_read(tmp_path: Path) -> None:
    merges = [("▁", "a"), ("b", "c"), ("▁a", "bc")]
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abc", "▁a", "bc", "▁abc"]
    vocab = {token: id_ for id_, token in enumerate(letters)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    for age in ("old", "new"):
        if age == "old":
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            backend.normalizer = normalizers.Sequence([])
            backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False, prepend_scheme="first")
        saved = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
        saved.save_pretrained(tmp_path / age)
        write(tmp_path / age / "tokenizer_config.json", add_bos_token=True)
        ours = OurTokenizer.of_model(tmp_path / age)
        assert ours.encode("abc é") == [1, *saved.encode("abc é")]
        assert ours.decode(ours.encode("abc é")) == " abc é"


def test_the_end_of_an_answer_is_what_any_of_the_files_says(folder: Path) -> None:
    end = OurTokenizer.of_model(folder).encode("<|end|>")[-1]
    assert OurTokenizer.of_model(folder).eos_ids == (7, end)
    write(folder / "generation_config.json", eos_token_id=[9, 7])
    assert OurTokenizer.of_model(folder).eos_ids == (9, 7, end)


@pytest.mark.parametrize(("add_bos", "expected"), [(True, ["<|begin|>"]), (False, []), (None, [])])
def test_the_config_decides_about_bos_before_the_tokenizer_does(
    folder: Path, add_bos: bool | None, expected: list[str]
) -> None:
    write(folder / "tokenizer_config.json", add_bos_token=add_bos)
    ours = OurTokenizer.of_model(folder)
    plain = ours.encode("x", add_special=False)
    assert ours.encode("x") == [*(ours.encode(token, add_special=False)[0] for token in expected), *plain]


@pytest.mark.parametrize(
    "template",
    [
        "{{ eos_token }}!",
        [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}!"}],
        {"tool_use": "no", "default": "{% generation %}{{ eos_token }}{% endgeneration %}!"},
    ],
)
def test_a_chat_template_may_be_a_text_or_several(folder: Path, template: Any) -> None:
    (folder / "chat_template.jinja").unlink()
    write(folder / "tokenizer_config.json", chat_template=template, eos_token={"content": "<|end|>", "lstrip": False})
    assert OurTokenizer.of_model(folder).render_chat([]) == "<|end|>!"
    (folder / "chat_template.jinja").write_text("from the file")
    assert OurTokenizer.of_model(folder).render_chat([]) == "from the file"


def test_a_token_without_an_embedding_cannot_be_written(folder: Path) -> None:
    size = OurTokenizer.of_model(folder).vocab_size
    path = folder / "tokenizer.json"
    parsed = json.loads(path.read_text())
    parsed["added_tokens"].append({**parsed["added_tokens"][0], "id": size, "content": "<|late|>"})
    path.write_text(json.dumps(parsed))
    write(folder / "config.json", vocab_size=size + 1)
    assert OurTokenizer.of_model(folder).encode("<|late|>") == [size]
    write(folder / "config.json", vocab_size=size)
    assert max(OurTokenizer.of_model(folder).encode("<|late|>")) < size
    write(folder / "config.json", vocab_size=size - 1)
    with pytest.raises(EngineError, match=f"{size} tokens, but embeddings for {size - 1} only"):
        OurTokenizer.of_model(folder)


def test_a_directory_whose_tokenizer_we_cannot_read_says_why(folder: Path) -> None:
    path = folder / "tokenizer.json"
    write(path, decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(EngineError, match=r"the decoder \(WordPiece\) is neither byte-level nor sentencepiece's"):
        OurTokenizer.of_model(folder)
    write(path, decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}, model={"type": "odd"})
    with pytest.raises(EngineError, match=r"tokenizer\.json cannot be used"):
        OurTokenizer.of_model(folder)
    path.unlink()
    (folder / "tokenizer.model").write_bytes(b"")
    with pytest.raises(EngineError, match=r"has no tokenizer\.json; it has tokenizer\.model, which Transformers can"):
        OurTokenizer.of_model(folder)
