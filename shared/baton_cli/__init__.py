"""The command line: baton up, down, restart."""
