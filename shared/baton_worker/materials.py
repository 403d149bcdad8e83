"""What a worker is built from, besides its configuration."""

from dataclasses import dataclass

from baton_core.request import Incarnation
from baton_worker.config import Role
from baton_worker.models import ModelFile
from baton_worker.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Materials:
    """One life of one worker: who it is, its model, and the command that starts its rank."""

    role: Role
    incarnation: Incarnation
    model: ModelFile
    tokenizer: Tokenizer
    rank_command: tuple[str, ...]
