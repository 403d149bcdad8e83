"""The real model, requantised to every kind of GGUF file, still knows the capital of France."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("gguf")

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

from baton_core.errors import EngineError
from baton_worker.models import resolve_model
from baton_worker.tokenizer import Tokenizer
from tiny_folders import answers, load

QUESTION = "What is the capital of France? Answer briefly."


@pytest.fixture(scope="module")
def reader() -> GGUFReader:
    try:
        return GGUFReader(resolve_model("smollm2-135m-instruct").path)
    except EngineError as error:
        pytest.skip(str(error))


def requantise(reader: GGUFReader, path: Path, kind: GGMLQuantizationType) -> Path:
    """Everything of the file that `reader` has read, with its matrices as `kind`."""
    writer = GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        stored = kind if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16", "F32"])
def test_the_real_model_of_every_kind_answers_paris(tmp_path: Path, reader: GGUFReader, kind: str) -> None:
    path = requantise(reader, tmp_path / "model.gguf", GGMLQuantizationType[kind])
    tokenizer = Tokenizer.of_model(path)
    prompt = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": QUESTION}]), add_special=False)
    engine = load(path, dtype="bfloat16", page_tokens=16)
    (answer,) = answers(engine, [prompt], 10, 64)
    engine.close()
    assert "Paris" in tokenizer.decode(answer)
