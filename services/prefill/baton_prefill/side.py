"""What a prefill rank does with the effects that only prefill knows: it offers, takes orders, and pushes."""

from typing import assert_never

from baton_core.agreement import MetadataRows, Staging
from baton_core.effects import Connect, Expect, Offer, Push
from baton_core.kv_layout import UnitLayout
from baton_core.limits import Millis
from baton_core.messages import PageOrder
from baton_core.request import Incarnation
from baton_engine.transfer.protocol import Sender


class PrefillSide:
    """Drives a `Sender`."""

    rows: MetadataRows | None = None
    staging: Staging | None = None

    def __init__(self, sender: Sender) -> None:
        self.attempts = sender

    def perform(self, effect: Expect | Offer | Push | Connect, now: Millis) -> None:
        """Offer or push. The other two are decode's; a prefill core never asks for them."""
        match effect:
            case Offer():
                target = UnitLayout.from_text(effect.target)
                self.attempts.offer(effect.room, effect.attempt, effect.peer, target, effect.prompt_tokens)
            case Push():
                self.attempts.push(effect)
            case Expect() | Connect():
                raise AssertionError(f"prefill was asked to {effect}")
            case _:
                assert_never(effect)

    def order(self, peer: Incarnation, order: PageOrder) -> None:
        """A decode rank ordered pages."""
        self.attempts.order(peer, order)

    def peer_gone(self, peer: Incarnation) -> None:
        """Keep nothing about a decode rank that is gone."""
        self.attempts.peer_gone(peer)
