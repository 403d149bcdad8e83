"""Choice of workers: pure policies over what the router knows."""
