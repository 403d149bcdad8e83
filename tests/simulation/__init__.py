"""The deterministic simulation: real cores under a seeded network, clock, transfer and process faults.

Read `world` first; then `worker`, `unit`, `rank` and `stage` (a core and what surrounds it), `leader` (who writes the log
and speaks for the unit), `tensors` and `oracle` (what is computed), `transfer`, `clients`, `faults`, `invariants`.
"""
