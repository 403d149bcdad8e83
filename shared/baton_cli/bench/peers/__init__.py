"""Other engines, each in its own virtual environment, as rivals under the same load."""
