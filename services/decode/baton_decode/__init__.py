"""The decode worker: receives KV caches and streams answers."""
