"""The pure heart of Baton: every decision of a prefill/decode handoff, and nothing that observes the world.

Only the standard library is imported here, minus clocks, random numbers, files, sockets, threads and logging. Time comes
in as an argument, actions go out as values (`effects`). `tests/test_tidy.py` holds this rule.

Read in this order: `request` (what is served), `messages` and `events` (what may happen), `effects` (what may be done),
`machine` (how a table of transitions is applied), `prefill/` and `decode/` (the two sides), `agreement` (how ranks agree).
"""
