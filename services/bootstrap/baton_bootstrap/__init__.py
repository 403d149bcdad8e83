"""The bootstrap registry as a service of its own."""
