"""How KV pages travel from prefill ranks to decode ranks: one small protocol, one contract test, several backends.

    prefill rank                                                      decode rank
    sender.PageSender ── ways: shm_way, tcp_way ══ pages, row ══► doors: shm_door, tcp_door ── receiver.PageReceiver
          └──────────── attempts.AttemptTable                       attempts.AttemptTable ────────────┘

`protocol` says what a backend owes the driver; `fake` moves nothing.
"""
