"""Runs in a peer's own virtual environment, by path, and imports nothing of Baton: a library as a line protocol.

    in   {"prompts": [[1, 2, …], …], "output_tokens": 64}
    out  {"event": "ready", "versions": {…}}   once · {"event": "tokens", "of": [0, 1, …]}   one new token each
         {"event": "end"}                      after each request

The peer's packages are loaded by name: they exist only where this runs, and Baton's own command line must not need them.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TextIO

Emit = Callable[[Sequence[int]], None]


class Engine(Protocol):
    """A library that generates."""

    @property
    def packages(self) -> tuple[str, ...]:
        """Whose versions are worth knowing."""
        ...

    def generate(self, prompts: list[list[int]], output_tokens: int, emit: Emit) -> None:
        """Exactly `output_tokens` greedy tokens for each prompt; `emit` is told who has a new one."""
        ...


class Transformers:
    """`model.generate` on the GGUF itself, all prompts as one static batch (they are of one length)."""

    packages = ("transformers", "torch")

    def __init__(self, model: Path, dtype: str, threads: int) -> None:
        self._torch = importlib.import_module("torch")
        self._torch.set_num_threads(threads)
        self._torch.set_num_interop_threads(1)
        auto = importlib.import_module("transformers").AutoModelForCausalLM
        kind = getattr(self._torch, dtype)
        self._model = auto.from_pretrained(str(model.parent), gguf_file=model.name, dtype=kind).eval()

    def generate(self, prompts: list[list[int]], output_tokens: int, emit: Emit) -> None:
        """As `Engine`."""
        ids = self._torch.tensor(prompts)
        with self._torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=output_tokens,
                min_new_tokens=output_tokens,
                do_sample=False,
                pad_token_id=0,
                streamer=_Streamer(len(prompts), emit),
            )


class _Streamer:
    """What `generate` calls with the prompt, then with each step's tokens."""

    def __init__(self, sequences: int, emit: Emit) -> None:
        self._everybody, self._emit = range(sequences), emit
        self._prompt_seen = False

    def put(self, _tokens: Any) -> None:
        if self._prompt_seen:
            self._emit(list(self._everybody))
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is buffered."""


class LlamaCpp:
    """llama-cpp-python's own evaluation loop, greedy, one prompt after the other: it has no batches."""

    packages = ("llama-cpp-python",)

    def __init__(self, model: Path, dtype: str, threads: int) -> None:
        # The weights stay as the file has them; `dtype` says nothing here.
        llama = importlib.import_module("llama_cpp").Llama
        self._llama = llama(
            model_path=str(model), n_ctx=8192, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def generate(self, prompts: list[list[int]], output_tokens: int, emit: Emit) -> None:
        """As `Engine`."""
        for index, prompt in enumerate(prompts):
            self._llama.reset()
            self._llama.eval(prompt)
            for number in range(output_tokens):
                token = self._llama.sample(temp=0.0)
                emit([index])
                if number + 1 < output_tokens:
                    self._llama.eval([token])


ENGINES: dict[str, Callable[[Path, str, int], Engine]] = {"transformers": Transformers, "llama.cpp": LlamaCpp}


def main() -> None:
    """Load, say ready, answer line by line until stdin closes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cores", required=True, help="such as 0 or 0,1; as many threads compute")
    arguments = parser.parse_args()
    out, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints must not look like an event
    cores = [int(core) for core in arguments.cores.split(",")]
    os.sched_setaffinity(0, cores)
    engine = ENGINES[arguments.engine](arguments.model, arguments.dtype, len(cores))
    _say(out, {"event": "ready", "versions": {name: version(name) for name in engine.packages}})
    for line in sys.stdin:
        ask = json.loads(line)
        engine.generate(ask["prompts"], ask["output_tokens"], lambda of: _say(out, {"event": "tokens", "of": of}))
        _say(out, {"event": "end"})


def _say(out: TextIO, event: dict[str, object]) -> None:
    out.write(json.dumps(event) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
