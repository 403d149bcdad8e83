"""`baton top`: a live view of a stack in the terminal, from what its processes export for Prometheus."""
