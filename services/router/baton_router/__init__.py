"""The DP-aware router: the one address that clients use."""
