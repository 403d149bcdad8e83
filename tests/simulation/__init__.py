"""The deterministic simulation: real cores under a seeded network, clock, transfer and process faults.

Read `world` first, then `process` (the driver shell around a core), `transfer`, `clients`, `faults`, `invariants`.
"""
