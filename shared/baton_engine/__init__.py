"""The engine: torch models, the KV pool, sampling, transfer backends and the scheduler driver around a pure core."""
