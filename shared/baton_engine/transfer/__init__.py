"""How KV pages travel from a prefill rank to a decode rank: one small protocol, one contract test, several backends.

`protocol` says what a backend owes the driver; `tcp` streams pages into the receiver's own hands; `fake` moves nothing.
"""
