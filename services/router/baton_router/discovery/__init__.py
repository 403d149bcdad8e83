"""Where workers are learnt from: files, the bootstrap registry, Kubernetes, Docker. Each names all it knows, always."""
