"""Runs in vLLM's virtual environment, by path: writes a GGUF model as a Hugging Face directory in bfloat16.

`save_pretrained` refuses a model that was loaded from GGUF, so its weights are copied into a fresh one.
"""

import importlib
import sys
from pathlib import Path


def export(model: Path, directory: Path) -> None:
    """Write config, tokenizer and weights; the directory appears only when it is complete."""
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        str(model.parent), gguf_file=model.name, dtype=torch.bfloat16
    )
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)  # these weights are not quantised any more
    config = loaded.config.__class__(**settings)
    fresh = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fresh.load_state_dict(loaded.state_dict())
    partial = directory.with_name(directory.name + ".partial")
    fresh.save_pretrained(str(partial))
    transformers.AutoTokenizer.from_pretrained(str(model.parent), gguf_file=model.name).save_pretrained(str(partial))
    partial.rename(directory)


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
