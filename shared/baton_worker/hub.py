"""Downloads a model from the Hugging Face hub, with its own client where that is installed."""

from pathlib import Path

import httpx
import structlog

from baton_core.errors import EngineError

log = structlog.get_logger(__name__)

WANTED = ("*.json", "*.jinja", "*.safetensors")
"""What is downloaded: configuration, tokenizer and weights, in no other format."""
UNWANTED = ("consolidated*", "original/*", "onnx/*")
"""The same weights once more, in the form their author trained them."""


def download(repository: str, revision: str | None, endpoint: str | None) -> Path:
    """The directory of the model, from the client's cache or the hub. Raises EngineError that says what to do.

    The client shows its progress on stderr, and reads its own settings: cache, token, address, offline mode.
    """
    try:
        # Optional, and slow to import: whoever serves a file needs nothing of it.
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise EngineError(
            f"model {repository!r} is on the Hugging Face hub, and huggingface_hub is not installed: run "
            "`pip install huggingface_hub`, or give the path of a model on this machine"
        ) from error
    log.info("model.fetching", repository=repository, revision=revision)
    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            endpoint=endpoint,
            allow_patterns=list(WANTED),
            ignore_patterns=list(UNWANTED),
        )
    except (OSError, ValueError, httpx.HTTPError) as error:
        text = " ".join(str(error).split())
        raise EngineError(
            f"model {repository!r} cannot be fetched from the Hugging Face hub: {text} Check the name and the "
            f"network; a gated model needs a token (HF_TOKEN). Without a network, download it elsewhere with "
            f"`hf download {repository}` and give the path of the directory."
        ) from error
    return Path(folder)
