"""Drivers without torch: links, codec, peers and registry client, registry routes, configuration, logs, metrics."""
